"""What an attention backend is, what it declares, and how one is chosen at start-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from quire.config.latent import LatentConfig
from quire.layers.attention.layer import AttentionStep
from quire.layers.attention.shared_prefix import PrefixTiles
from quire.protocol.errors import OptionError
from quire.protocol.plan import Int32Array


@dataclass(frozen=True)
class DividedRows:
    """Requests with few new tokens and tiles of the others, as a captured step has them.

    Where `decode_queries` is 1, requests with several new tokens have a context of 0 among those of
    decode attention, and name any token there. Where it is more, decode attention leaves requests
    with more new tokens alone, and has the queries tokens[r]:tokens[r+1] of the others.
    """

    tokens: Tensor  # int32 [requests], or one more: first queries of decode attention
    lens: Tensor  # int32 [requests]: contexts of decode attention
    tile_requests: Tensor  # int32 [tiles]
    tile_indices: Tensor  # int32 [tiles]


@dataclass(frozen=True)
class AttentionInputs:
    """Where the tokens of a step belong. Request r owns the tokens query_start[r]:query_start[r+1].

    All tensors are on the backend's device.
    """

    query_start: Tensor  # int32 [requests + 1]
    context_lens: Tensor  # int32 [requests], tokens in the cache, those of this step included
    block_tables: Tensor  # int32 [requests, max_blocks]
    slots: Tensor  # int64 [tokens], block * block_size + offset, where each new token is stored
    query_lens: Int32Array  # new tokens of each request, on the host; in a captured step at most
    send: Callable[..., list[Tensor]]  # host integers to the device, in one copy
    prefixes: PrefixTiles | None = None  # what requests with one new token share, if used
    divided: DividedRows | None = None  # in place of what follows from `query_lens`
    decode_queries: int = 1  # most new tokens of a request that decode attention is to take
    max_context_lens: Int32Array | None = None  # bounds of contexts, on the host; None if captured


@dataclass(frozen=True)
class KVScales:
    """Of a cache in 8 bits: what is stored times its scale is the key or value."""

    stored: Tensor  # bfloat16 [layers, blocks, num_kv_heads, block_size, 2 or 1], of each token
    given: Tensor  # float32 [layers, 2, num_kv_heads]: the checkpoint's, 0 where it has none


@dataclass(frozen=True)
class BackendSupport:
    """What a backend can do. `head_dims` None means any."""

    name: str
    device_types: tuple[str, ...] | None  # None: any
    dtypes: tuple[torch.dtype, ...]
    narrow_caches: tuple[torch.dtype, ...]  # of keys and values, beside the type of activations
    block_sizes: tuple[int, ...]
    head_dims: tuple[int, ...] | None
    sliding_window: bool
    pairs: bool  # keys and values of their own
    latent: bool  # keys whose first numbers are the values, kept once
    batch_invariant: bool  # a request's result does not depend on what else is in the batch
    cuda_graphs: bool  # steps can be captured, and slots of -1 are not written


class AttentionBackend(Protocol):
    """Computes attention over `kv [layers, 2, blocks, num_kv_heads, block_size, head_dim]`, which
    has scales where it is in 8 bits; in latent layers there is 1 in place of 2."""

    support: ClassVar[BackendSupport]
    max_prefix_rows: ClassVar[int] = 0
    """Largest batch in which a shared prefix can be read once; 0: never."""
    prefix_members: int = 0
    """Requests whose queries of a shared prefix go into one tile."""
    prefill_name: str | None = None
    """Which kernel attends with prompts, where there are several."""
    tile_queries: int = 0
    """Queries of a request that go into one tile, where it has several; 0: there are no tiles."""
    max_decode_queries: int = 1
    """Most new tokens of a request that decode attention can take; others go into tiles."""
    expanded_queries: int | None = None
    """From so many new tokens of a request on, other kernels attend."""

    def __init__(
        self,
        kv: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        scales: KVScales | None = None,
        latent: LatentConfig | None = None,
    ) -> None: ...

    @classmethod
    def missing(cls) -> str | None:
        """Why the backend cannot run on this machine at all, or None if it can."""
        ...

    @classmethod
    def describe(cls) -> str:
        """What runs, for the log."""
        ...

    def plan(self, inputs: AttentionInputs) -> AttentionStep:
        """Does the host work of a step, once for all layers."""
        ...


class GroupedAttention:
    """Backends may differ between groups; what steps are cut into fits all of them."""

    def __init__(self, backends: Sequence[AttentionBackend]) -> None:
        self.backends = tuple(backends)
        tiles = {backend.tile_queries for backend in self.backends}
        assert len(tiles) == 1, "tiles are the same for all groups"
        (self.tile_queries,) = tiles
        """Queries of a request that go into one tile; 0: there are no tiles."""
        self.max_decode_queries = min(backend.max_decode_queries for backend in self.backends)
        self.prefix_members = min(backend.prefix_members for backend in self.backends)
        """Requests whose queries of a shared prefix go into one tile."""

    @property
    def prefill_names(self) -> list[str]:
        """Which kernels attend with prompts, where there are several."""
        names = (backend.prefill_name for backend in self.backends)
        return list(dict.fromkeys(name for name in names if name is not None))

    @property
    def expanded_queries(self) -> int | None:
        """From so many new tokens of a request on, other kernels attend in some group."""
        counts = (backend.expanded_queries for backend in self.backends)
        return min((count for count in counts if count is not None), default=None)

    def plan(self, inputs: Sequence[AttentionInputs]) -> tuple[AttentionStep, ...]:
        """Does the host work of a step, once for all layers; `inputs` are those of each group."""
        return tuple(backend.plan(one) for backend, one in zip(self.backends, inputs, strict=True))


def candidates() -> tuple[type[AttentionBackend], ...]:
    """All backends, the most wanted first."""
    # Imported here because they are written in terms of this module.
    from quire.layers.attention.cpu import CpuBackend
    from quire.layers.attention.mla import LatentBackend
    from quire.layers.attention.torch import TorchBackend
    from quire.layers.attention.triton import TritonBackend

    return (TritonBackend, LatentBackend, CpuBackend, TorchBackend)


def select_backend(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    window: int | None = None,
    wanted: str | None = None,
    cache_dtype: torch.dtype | None = None,
    is_latent: bool = False,
) -> tuple[type[AttentionBackend], list[str]]:
    """The first backend that can do what is asked, and why those before it were skipped.

    Naming a `wanted` one leaves no other choice. Keys and values have the type `cache_dtype`, or
    that of activations.
    """
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    backends = candidates()
    if wanted is not None:
        names = ", ".join(dict.fromkeys(backend.support.name for backend in backends))
        backends = tuple(backend for backend in backends if backend.support.name == wanted)
        if not backends:
            raise OptionError(f"attention_backend={wanted!r} does not exist; choose from {names}.")
    backends = tuple(
        backend
        for backend in backends
        if (backend.support.latent if is_latent else backend.support.pairs)
    )
    reasons: list[str] = []
    elsewhere: list[str] = []
    """Backends made for another device, which are not missed."""
    for backend in backends:
        reason = unsupported(
            backend.support,
            device_type,
            dtype,
            head_dim,
            block_size,
            window,
            cache_dtype,
        )
        reason = reason or backend.missing()
        if reason is None:
            return backend, reasons
        devices = backend.support.device_types
        is_here = devices is None or device_type in devices
        (reasons if is_here else elsewhere).append(f"{backend.support.name}: {reason}")
    reasons += elsewhere
    group = "layers" if window is None else f"layers with a window of {window} tokens"
    raise OptionError(
        f"No attention backend can do block_size={block_size} for {group} of head size {head_dim} "
        f"in {dtype} with a cache in {cache_dtype} on {device_type!r}: {'; '.join(reasons)}."
    )


def unsupported(
    support: BackendSupport,
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    window: int | None,
    cache_dtype: torch.dtype,
) -> str | None:
    """The first thing that is asked for and not declared, or None."""
    if support.device_types is not None and device_type not in support.device_types:
        return f"runs on {listed(support.device_types)}, not {device_type}"
    if dtype not in support.dtypes:
        return f"computes in {listed(support.dtypes)}, not {dtype}"
    if cache_dtype not in (dtype, *support.narrow_caches):
        types = listed((dtype, *support.narrow_caches))
        return f"keeps keys and values in {types}, not {cache_dtype} (kv_cache_dtype)"
    if block_size not in support.block_sizes:
        return f"block_size must be one of {listed(support.block_sizes)}, not {block_size}"
    if support.head_dims is not None and head_dim not in support.head_dims:
        return f"the head size must be one of {listed(support.head_dims)}, not {head_dim}"
    if window is not None and not support.sliding_window:
        return f"has no sliding window, the model has one of {window} tokens"
    return None


def listed(items: tuple[object, ...]) -> str:
    return ", ".join(str(item) for item in items)
