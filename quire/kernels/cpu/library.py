"""Finds and loads the native library."""

from __future__ import annotations

import ctypes
import importlib.metadata
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

LIBRARY_NAME = "libquire_cpu.so"
ISAS = ("generic", "avx2", "avx512")
ABI = 24


def _find_library() -> Path:
    """The library beside this file; in a clone where it was not built, that of an installation.
    Python takes the package from the folder it was started in, and so from the clone even where
    `pip install .` has put another copy elsewhere. `load` refuses one of another ABI."""
    beside = Path(__file__).with_name(LIBRARY_NAME)
    if beside.exists():
        return beside
    for installed in importlib.metadata.distributions(name="quire-llm"):
        elsewhere = Path(str(installed.locate_file(f"quire/kernels/cpu/{LIBRARY_NAME}")))
        if elsewhere.exists():
            return elsewhere
    return beside


LIBRARY = _find_library()


class AttentionCall(ctypes.Structure):
    """Mirrors `AttentionCall` in src/attention.h."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("num_requests", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
        ("stored", ctypes.c_int32),
    )


class WriteCall(ctypes.Structure):
    """Mirrors `WriteCall` in src/attention.h."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("k_stride", ctypes.c_int64),
        ("v_stride", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("token_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("stored", ctypes.c_int32),
    )


class QKVCall(ctypes.Structure):
    """Mirrors `QKVCall` in src/attention.h."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("num_heads", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class LayerCall(ctypes.Structure):
    """Mirrors `Layer` in src/linear_layer.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("norm_weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("residual", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("is_gated", ctypes.c_bool),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("adapters", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_threads", ctypes.c_int32),
    )


class FloatLinearCall(ctypes.Structure):
    """Mirrors `FloatLinearCall` in src/float_linear.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("kind", ctypes.c_int32),
    )


class SamplingCall(ctypes.Structure):
    """Mirrors `SamplingCall` in src/sampling.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("num_lines", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("seed_low", ctypes.c_void_p),
        ("seed_high", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("log_min_p", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class LogprobsCall(ctypes.Structure):
    """Mirrors `LogprobsCall` in src/logprobs.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("num_lines", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("log_total", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("top_ids", ctypes.c_void_p),
        ("num_top", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class NativeMatrix(ctypes.Structure):
    """Mirrors `PackedMatrix` in src/quantized.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
        ("input_planes", ctypes.c_int32),
        ("order", ctypes.c_void_p),
        ("num_columns", ctypes.c_int32),
        ("scale_blocks", ctypes.c_int32),
        ("has_zeros", ctypes.c_int32),
    )


MatrixHandle: TypeAlias = "ctypes._Pointer[NativeMatrix]"

PACKED_LINEAR = (
    ctypes.POINTER(NativeMatrix),
    ctypes.c_void_p,  # x
    ctypes.c_int64,  # x_stride
    ctypes.c_int64,  # num_tokens
    ctypes.c_void_p,  # bias
    ctypes.c_void_p,  # out
    ctypes.c_int64,  # out_stride
    ctypes.c_int32,  # num_threads
)
ADD_ADAPTERS = (
    ctypes.c_void_p,  # adapters
    ctypes.c_void_p,  # slots
    ctypes.c_void_p,  # x
    ctypes.c_int64,  # x_stride
    ctypes.c_int64,  # num_tokens
    ctypes.c_void_p,  # bias
    ctypes.c_void_p,  # out
    ctypes.c_int64,  # out_stride
    ctypes.c_int64,  # num_outputs
    ctypes.c_int32,  # num_threads
)
FLOAT_LINEARS = (
    ctypes.POINTER(FloatLinearCall),
    ctypes.c_int32,  # count
    ctypes.c_int64,  # x_step
    ctypes.c_int64,  # out_step
)
LARGEST = (
    ctypes.c_void_p,  # x
    ctypes.c_int64,  # stride
    ctypes.c_int64,  # num_rows
    ctypes.c_int32,  # width
    ctypes.c_void_p,  # out
    ctypes.c_int32,  # num_threads
)
PACKED_ROWS = (
    ctypes.POINTER(NativeMatrix),
    ctypes.c_void_p,  # ids
    ctypes.c_int64,  # count
    ctypes.c_void_p,  # out
)
APPLY_BITMASK = (
    ctypes.c_void_p,  # logits
    ctypes.c_int64,  # stride
    ctypes.c_int64,  # vocab_size
    ctypes.c_void_p,  # lines
    ctypes.c_void_p,  # bits
    ctypes.c_int64,  # num_lines
    ctypes.c_int64,  # num_words
    ctypes.c_int32,  # num_threads
)
PENALIZE = (
    ctypes.c_void_p,  # logits
    ctypes.c_int64,  # stride
    ctypes.c_int64,  # vocab_size
    ctypes.c_void_p,  # rows
    ctypes.c_int64,  # num_lines
    ctypes.c_void_p,  # uses
    ctypes.c_void_p,  # slots
    ctypes.c_void_p,  # repetition
    ctypes.c_void_p,  # frequency
    ctypes.c_void_p,  # presence
)
DEQUANTIZE = (
    ctypes.c_int32,  # kind
    ctypes.c_void_p,  # blocks
    ctypes.c_int64,  # num_blocks
    ctypes.c_void_p,  # out
    ctypes.c_int32,  # num_threads
)
PACK_INT8 = (
    ctypes.c_void_p,  # rows
    ctypes.c_int64,  # stride
    ctypes.c_int64,  # num_rows
    ctypes.c_int32,  # num_inputs
    ctypes.c_void_p,  # groups
)
PACK_CODES = (
    ctypes.c_void_p,  # codes
    ctypes.c_int64,  # stride
    ctypes.c_int64,  # num_rows
    ctypes.c_int32,  # num_columns
    ctypes.c_int32,  # bits
    ctypes.c_void_p,  # groups
    ctypes.c_int64,  # group_bytes
    ctypes.c_int32,  # num_threads
)
PROPOSE_NGRAMS = (
    ctypes.c_void_p,  # tokens
    ctypes.c_int64,  # stride
    ctypes.c_void_p,  # num_tokens
    ctypes.c_void_p,  # rows
    ctypes.c_int64,  # num_rows
    ctypes.c_int64,  # least
    ctypes.c_int64,  # most
    ctypes.c_int64,  # num_drafts
    ctypes.c_int64,  # beyond
    ctypes.c_void_p,  # drafts
)
WRITE_DRAFTS = (
    ctypes.c_void_p,  # table
    ctypes.c_void_p,  # rows
    ctypes.c_int64,  # num_rows
    ctypes.c_void_p,  # drafts
    ctypes.c_int64,  # num_drafts
    ctypes.c_void_p,  # counts
)
ACCEPT_TOKENS = (
    ctypes.c_void_p,  # table
    ctypes.c_void_p,  # rows
    ctypes.c_int64,  # num_rows
    ctypes.c_void_p,  # first_lines
    ctypes.c_void_p,  # num_lines
    ctypes.c_void_p,  # sampled
    ctypes.c_void_p,  # counts
)
ALL_REDUCE = (
    ctypes.c_void_p,  # meeting
    ctypes.c_void_p,  # x
    ctypes.c_int64,  # count
    ctypes.c_int32,  # dtype
)
ALL_GATHER = (
    ctypes.c_void_p,  # meeting
    ctypes.c_void_p,  # x
    ctypes.c_void_p,  # out
    ctypes.c_int64,  # num_bytes
)
BROADCAST = (
    ctypes.c_void_p,  # meeting
    ctypes.c_void_p,  # x
    ctypes.c_int64,  # num_bytes
    ctypes.c_int32,  # source
)
MOVE = (
    ctypes.c_void_p,  # ring
    ctypes.c_void_p,  # x or out
    ctypes.c_int64,  # num_bytes
)


def available() -> tuple[bool, str]:
    """Whether the native library can be used, and what it is or why it cannot be."""
    library, reason = load(LIBRARY)
    return library is not None, reason


def native() -> ctypes.CDLL:
    """The library, for callers that have asked `available`."""
    library, reason = load(LIBRARY)
    if library is None:
        raise RuntimeError(reason)
    return library


def isas() -> tuple[str, ...]:
    """The instruction sets that this processor has, widest last."""
    return ISAS[: native().quire_best_isa() + 1]


def set_isa(isa: str | None) -> None:
    """Forces an instruction set; None goes back to the widest one. For tests and benchmarks."""
    name = isas()[-1] if isa is None else isa
    if name not in ISAS or native().quire_set_isa(ISAS.index(name)) != 0:
        raise ValueError(f"isa={name!r}: this processor has {', '.join(isas())}")


class _Threads:
    """How many threads share the work of a call."""

    wanted: int | None = None


def set_num_threads(count: int | None) -> None:
    """Has calls share their work among `count` threads; None stands for as many as torch has."""
    _Threads.wanted = count


def num_threads() -> int:
    return torch.get_num_threads() if _Threads.wanted is None else _Threads.wanted


def require_rows(name: str, x: Tensor, width: int) -> int:
    """Elements from one row to the next; refuses what the library would read or write wrongly."""
    if x.dim() == 2 and x.dtype == torch.float32 and x.is_cpu and x.shape[1] == width:
        stride, inner_stride = x.stride()
        if inner_stride == 1 or width == 1 or not len(x):
            return stride
    raise ValueError(
        f"{name} must be float32 [tokens, {width}] on the CPU, contiguous in its rows; "
        f"got {x.dtype} {list(x.shape)} on {x.device} with strides {x.stride()}"
    )


def require_column(name: str, x: Tensor, dtype: torch.dtype, length: int) -> None:
    """Refuses what the library would read wrongly."""
    if x.dtype != dtype or x.device.type != "cpu" or x.shape != (length,) or not x.is_contiguous():
        raise ValueError(
            f"{name} must be {length} contiguous numbers of type {dtype} on the CPU; "
            f"got {x.dtype} on {x.device} of shape {tuple(x.shape)} with strides {x.stride()}"
        )


@cache
def load(path: Path) -> tuple[ctypes.CDLL | None, str]:
    """The library at `path` and a description of it, or None and the reason."""
    if not path.exists():
        return None, (
            f"the native library {path} was not built; install a C++ compiler, then install quire "
            "again (in a clone: `pip install -e .`)"
        )
    try:
        library = ctypes.CDLL(str(path))
        abi = library.quire_abi()
    except (OSError, AttributeError) as error:
        return None, f"the native library cannot be loaded: {error}"
    if abi != ABI:
        return None, f"the native library has ABI {abi}, not {ABI}; install quire again"
    library.quire_float_linear.argtypes = (ctypes.POINTER(FloatLinearCall),)
    library.quire_float_linears.argtypes = FLOAT_LINEARS
    library.quire_float_linears.restype = None
    library.quire_packed_linear.argtypes = PACKED_LINEAR
    library.quire_packed_rows.argtypes = PACKED_ROWS
    library.quire_dequantize.argtypes = DEQUANTIZE
    library.quire_pack_int8.argtypes = PACK_INT8
    library.quire_pack_int8.restype = None
    library.quire_pack_codes.argtypes = PACK_CODES
    library.quire_pack_codes.restype = None
    library.quire_norm_linear.argtypes = (ctypes.POINTER(NativeMatrix), ctypes.POINTER(LayerCall))
    library.quire_add_adapters.argtypes = ADD_ADAPTERS
    heads = (QKVCall, WriteCall, AttentionCall)
    library.quire_attend_qkv.argtypes = tuple(ctypes.POINTER(call) for call in heads)
    library.quire_largest.argtypes = LARGEST
    library.quire_largest.restype = None
    library.quire_sample.argtypes = (ctypes.POINTER(SamplingCall),)
    library.quire_summarize.argtypes = (ctypes.POINTER(LogprobsCall),)
    library.quire_penalize.argtypes = PENALIZE
    library.quire_penalize.restype = None
    library.quire_propose_ngrams.argtypes = PROPOSE_NGRAMS
    library.quire_write_drafts.argtypes = WRITE_DRAFTS
    library.quire_accept_tokens.argtypes = ACCEPT_TOKENS
    library.quire_apply_bitmask.argtypes = APPLY_BITMASK
    library.quire_apply_bitmask.restype = None
    library.quire_region_bytes.argtypes = (ctypes.c_int32, ctypes.c_int64)
    library.quire_region_bytes.restype = ctypes.c_int64
    library.quire_all_reduce.argtypes = ALL_REDUCE
    library.quire_all_gather.argtypes = ALL_GATHER
    library.quire_broadcast.argtypes = BROADCAST
    library.quire_ring_bytes.argtypes = (ctypes.c_int64,)
    library.quire_ring_bytes.restype = ctypes.c_int64
    library.quire_send.argtypes = MOVE
    library.quire_receive.argtypes = MOVE
    library.quire_publish.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.quire_publish.restype = None
    library.quire_watch.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    library.quire_watch.restype = ctypes.c_int64
    return library, f"native library, {ISAS[library.quire_best_isa()]}"
