"""Drafts in the native library: from a text itself, and in the row table. The references in
`quire.kernels.torch.ngrams` and `quire.kernels.torch.rows` have the same names."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire.kernels.cpu.library import native, require_column
from quire.kernels.torch.ngrams import NgramSettings
from quire.kernels.torch.rows import DraftedRows


def propose_ngrams(
    token_ids: Tensor, num_tokens: Tensor, rows: Tensor, settings: NgramSettings
) -> Tensor:
    """As the reference."""
    assert token_ids.dtype == torch.int32 and token_ids.stride(1) == 1
    require_column("num_tokens", num_tokens, torch.int32, len(token_ids))
    require_column("rows", rows, torch.int32, len(rows))
    drafts = torch.empty((len(rows), settings.num_drafts), dtype=torch.int32)
    native().quire_propose_ngrams(
        token_ids.data_ptr(),
        token_ids.stride(0),
        num_tokens.data_ptr(),
        rows.data_ptr(),
        len(rows),
        settings.least,
        settings.most,
        settings.num_drafts,
        settings.beyond,
        drafts.data_ptr(),
    )
    return drafts


class DraftedRowsCall(ctypes.Structure):
    """`QuireDraftedRows` in src/ngrams.cpp."""

    _fields_ = (
        ("tokens", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("num_tokens", ctypes.c_void_p),
        ("num_computed", ctypes.c_void_p),
        ("waiting", ctypes.c_void_p),
        ("appends", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, table: DraftedRows) -> DraftedRowsCall:
        tokens, *numbers = table
        assert all(part.dtype == torch.int32 and part.stride(-1) == 1 for part in table)
        addresses = (column.data_ptr() for column in numbers)
        return cls(tokens.data_ptr(), tokens.stride(0), tokens.shape[1], *addresses)


def write_drafts(rows: Tensor, drafts: Tensor, table: DraftedRows) -> Tensor:
    """As the reference."""
    rows, counts = rows.int(), torch.empty(len(rows), dtype=torch.int32)
    require_column("drafts", drafts.view(-1), torch.int32, drafts.numel())
    native().quire_write_drafts(
        ctypes.byref(DraftedRowsCall.of(table)),
        rows.data_ptr(),
        len(rows),
        drafts.data_ptr(),
        drafts.shape[1],
        counts.data_ptr(),
    )
    return counts


def accept_tokens(
    rows: Tensor, first_lines: Tensor, num_lines: Tensor, tokens: Tensor, table: DraftedRows
) -> Tensor:
    """As the reference."""
    rows, counts = rows.int(), torch.empty(len(rows), dtype=torch.int32)
    require_column("first_lines", first_lines, torch.int32, len(rows))
    require_column("num_lines", num_lines, torch.int32, len(rows))
    require_column("tokens", tokens, torch.int32, len(tokens))
    native().quire_accept_tokens(
        ctypes.byref(DraftedRowsCall.of(table)),
        rows.data_ptr(),
        len(rows),
        first_lines.data_ptr(),
        num_lines.data_ptr(),
        tokens.data_ptr(),
        counts.data_ptr(),
    )
    return counts
