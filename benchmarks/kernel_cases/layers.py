"""What a layer runs beside attention: rotation and cache write, norm, activation, linear."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_cases.case import (
    BLOCK_SIZE,
    DEVICE,
    DIM,
    HEADS,
    KV_HEADS,
    SHAPE,
    Call,
    Case,
    Sides,
    check_close,
    copies_of,
    random,
)
from quire.kernels import dispatch
from quire.kernels.torch.attention import write_kv
from quire.kernels.torch.qkv import rms_norm as rms_norm_reference
from quire.kernels.torch.qkv import rotate
from quire.kernels.triton.activation import silu_and_mul
from quire.kernels.triton.norm import rms_norm
from quire.kernels.triton.rotary_cache import rotate_and_write


def rotation_and_write(num_tokens: int) -> Case:
    width = (HEADS + 2 * KV_HEADS) * DIM
    num_bytes = num_tokens * 2 * 2 * width  # all heads are read once and written once

    def make() -> Sides:
        copies = copies_of(num_bytes)
        joined = random(copies, num_tokens, HEADS + 2 * KV_HEADS, DIM)
        kv = random(2, -(-copies * num_tokens // BLOCK_SIZE), KV_HEADS, BLOCK_SIZE, DIM)
        slots = torch.randperm(kv.shape[1] * BLOCK_SIZE, device=DEVICE)
        positions = torch.randint(0, 4096, (num_tokens,), device=DEVICE)
        angles = torch.randn(4096, DIM // 2, device=DEVICE)
        cos, sin = angles.cos(), angles.sin()

        def parts(copy: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            q, k, v = joined[copy].split([HEADS, KV_HEADS, KV_HEADS], 1)
            return q, k, v, slots[copy * num_tokens : (copy + 1) * num_tokens]

        def ours(copy: int) -> Call:
            q, k, v, own = parts(copy)
            return lambda: rotate_and_write(q, k, v, kv, own, positions, cos, sin)

        def torchs(copy: int, target: Tensor = kv) -> Call:
            q, k, v, own = parts(copy)

            def call() -> Tensor:
                table = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
                write_kv(target, rotate(k, *table), v, own)
                return rotate(q, *table)

            return call

        def check() -> None:
            expected_kv = kv.clone()
            expected, found = torchs(0, expected_kv)(), ours(0)()
            assert isinstance(expected, Tensor) and isinstance(found, Tensor)
            check_close(found, expected)
            check_close(kv, expected_kv)

        return Sides([ours(i) for i in range(copies)], [torchs(i) for i in range(copies)], check)

    return Case(f"{num_tokens:,} tokens", num_bytes, 0, True, make)


def norm_with_residual(rows: int) -> Case:
    dim, eps = SHAPE.hidden, SHAPE.norm_eps
    num_bytes = 4 * rows * dim * 2

    def make() -> Sides:
        copies = copies_of(num_bytes)
        x, residual, weight = random(copies, rows, dim), random(copies, rows, dim), random(dim)

        def torchs(copy: int) -> Tensor:
            total = residual[copy].add_(x[copy])
            return F.rms_norm(total, (dim,), weight, eps)

        def check() -> None:
            total = x[0] + residual[0]
            check_close(
                rms_norm(x[0], weight, eps, residual[0]), rms_norm_reference(total, weight, eps)
            )
            check_close(residual[0], total)

        return Sides(
            [partial(rms_norm, x[i], weight, eps, residual[i]) for i in range(copies)],
            [partial(torchs, i) for i in range(copies)],
            check,
        )

    return Case(f"{rows:,} rows of {dim:,}", num_bytes, 0, True, make)


def gated_activation(rows: int) -> Case:
    inner = SHAPE.inner
    num_bytes = 3 * rows * inner * 2

    def make() -> Sides:
        copies = copies_of(num_bytes)
        x = random(copies, rows, 2 * inner)

        def torchs(copy: int) -> Tensor:
            gate, up = x[copy].chunk(2, -1)
            return F.silu(gate) * up

        return Sides(
            [partial(silu_and_mul, x[i]) for i in range(copies)],
            [partial(torchs, i) for i in range(copies)],
            lambda: check_close(silu_and_mul(x[0]), torchs(0)),
        )

    return Case(f"{rows:,} rows of 2 x {inner:,}", num_bytes, 0, True, make)


def linear(batch: int, outputs: int, inputs: int) -> Case:
    num_bytes = 2 * (outputs * inputs + batch * (outputs + inputs))

    def make() -> Sides:
        copies = copies_of(num_bytes)
        x, weight = random(copies, batch, inputs), random(copies, outputs, inputs)

        def check() -> None:
            expected = F.linear(x[0].float(), weight[0].float())
            check_close(dispatch.linear(x[0], weight[0]), expected)

        return Sides(
            [partial(dispatch.linear, x[i], weight[i]) for i in range(copies)],
            [partial(F.linear, x[i], weight[i]) for i in range(copies)],
            check,
        )

    size = f"{batch:,} x {outputs:,} x {inputs:,}"
    return Case(size, num_bytes, 2 * batch * outputs * inputs, False, make)


def fused_linear(outputs: int, inputs: int, gated: bool) -> Case:
    """Residual, norm and linear layer of one token, and the gated activation of gate and up."""
    num_bytes = 2 * outputs * inputs
    eps = SHAPE.norm_eps

    def make() -> Sides:
        copies = copies_of(num_bytes)
        x, residual = random(copies, 1, inputs), random(copies, 1, inputs)
        norm, weight = random(inputs), random(copies, outputs, inputs) / inputs**0.5

        def ours(copy: int) -> tuple[Tensor, Tensor]:
            return dispatch.norm_linear(
                x[copy], residual[copy], norm, eps, weight[copy], gated=gated
            )

        def torchs(copy: int) -> Tensor:
            total = x[copy] + residual[copy]
            out = F.linear(F.rms_norm(total, (inputs,), norm, eps), weight[copy])
            if gated:
                gate, up = out.chunk(2, -1)
                out = F.silu(gate) * up
            return out

        def check() -> None:
            # First, as the residual may be overwritten.
            expected, expected_total = torchs(0), x[0] + residual[0]
            out, total = ours(0)
            check_close(total, expected_total)
            check_close(out, expected)

        return Sides(
            [partial(ours, i) for i in range(copies)],
            [partial(torchs, i) for i in range(copies)],
            check,
        )

    size = f"{outputs:,} x {inputs:,}{', gated' if gated else ''}"
    return Case(size, num_bytes, 2 * outputs * inputs, False, make)


def embedding(num_tokens: int, vocab: int = SHAPE.vocab) -> Case:
    dim = SHAPE.hidden
    num_bytes = 2 * num_tokens * dim * 2

    def make() -> Sides:
        copies = copies_of(num_bytes)
        table = random(vocab, dim)
        ids = torch.randint(0, vocab, (copies, num_tokens), device=DEVICE)

        def check() -> None:
            assert torch.equal(dispatch.embedding(ids[0], table), F.embedding(ids[0], table))

        return Sides(
            [partial(dispatch.embedding, ids[i], table) for i in range(copies)],
            [partial(F.embedding, ids[i], table) for i in range(copies)],
            check,
        )

    return Case(f"{num_tokens:,} tokens of {dim:,}", num_bytes, 0, True, make)
