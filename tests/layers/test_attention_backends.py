"""Attention backends: the same numbers step by step as dense attention, and an honest choice.

A backend that forgets to store a step's keys, mixes up layers, or claims what it cannot do turns
these red.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire.layers.attention import backend
from quire.layers.attention.backend import (
    AttentionBackend,
    AttentionInputs,
    BackendSupport,
    KVScales,
    select_backend,
)
from quire.layers.attention.cpu import CpuBackend
from quire.layers.attention.layer import QKV
from quire.layers.attention.mla import LatentBackend
from quire.layers.attention.torch import TorchBackend
from quire.layers.attention.triton import TritonBackend
from quire.protocol.errors import OptionError
from quire.protocol.kv_spec import BLOCK_SIZES
from quire.worker.rows import Staging

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 6, 2, 32
LENGTHS = (37, 5, 70)
# Tokens of each request computed in each step: chunks, pauses and single tokens, mixed.
STEPS = ((16, 5, 0), (1, 0, 33), (19, 0, 36), (1, 0, 1))


@pytest.fixture(params=[TorchBackend, CpuBackend])
def backend_class(request: pytest.FixtureRequest) -> type[AttentionBackend]:
    reason = request.param.missing()
    if reason:
        pytest.skip(reason)
    return request.param


def step_inputs(computed: list[int], new: tuple[int, ...], tables: Tensor, size: int):
    """The inputs of a step, worked out token by token."""
    slots = [
        int(tables[request, position // size]) * size + position % size
        for request, count in enumerate(new)
        for position in range(computed[request], computed[request] + count)
    ]
    active = [request for request, count in enumerate(new) if count]
    counts = torch.tensor([0] + [new[request] for request in active])
    contexts = [computed[request] + new[request] for request in active]
    return AttentionInputs(
        query_start=counts.cumsum(0).int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables[active],
        slots=torch.tensor(slots, dtype=torch.int64),
        query_lens=np.array([new[request] for request in active], np.int32),
        send=Staging(torch.device("cpu")).send,
    )


def dense(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One request's attention without a cache, [tokens, width] in and out."""
    heads = [x.unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1).double() for x in (q, k, v)]
    position = torch.arange(len(q))
    seen = position[:, None] >= position
    if window is not None:
        seen &= position[:, None] - position < window
    out = scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
    return out.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("cache", [torch.float32, torch.float16])
def test_steps_give_dense_attention(
    backend_class: type[AttentionBackend], block_size: int, window: int | None, cache: torch.dtype
) -> None:
    check_steps(backend_class, block_size, window, cache, None, lambda x, part: x.to(cache))


@pytest.mark.parametrize(
    ("block_size", "window", "cache", "given"),
    [
        (16, None, torch.float8_e4m3fn, [[0.0, 0.0], [0.0, 0.0]]),
        (4, 20, torch.float8_e5m2, [[0.0, 0.0], [0.0, 0.0]]),
        (64, 20, torch.float8_e4m3fn, [[0.0078125, 0.015625], [0.25, 0.0]]),
    ],
    ids=str,
)
def test_steps_with_a_cache_in_8_bits(
    block_size: int, window: int | None, cache: torch.dtype, given: list[list[float]]
) -> None:
    """In plain torch; the scale of each token and head is its own, or the one that is given."""

    def stored(x: Tensor, part: int) -> Tensor:
        heads = x.unflatten(-1, (-1, HEAD_DIM))
        largest = torch.finfo(cache).max
        exact = heads.abs().amax(-1) / largest
        down = exact.bfloat16()
        up = torch.nextafter(down, torch.full_like(down, torch.inf))
        own = torch.where(down.float() < exact, up, down).float()
        if part == 1:
            own = torch.exp2(exact.log2().ceil())
        scale = torch.where(torch.tensor(given[part]) > 0, torch.tensor(given[part]), own)
        codes = (heads / scale[..., None]).clamp(-largest, largest).to(cache)
        return (codes.float() * scale[..., None]).flatten(-2)

    prescribed = torch.tensor(given).expand(NUM_LAYERS, 2, NUM_KV_HEADS)
    check_steps(TorchBackend, block_size, window, cache, prescribed, stored)


def check_steps(
    backend_class: type[AttentionBackend],
    block_size: int,
    window: int | None,
    cache: torch.dtype,
    given: Tensor | None,
    stored: Callable[[Tensor, int], Tensor],
) -> None:
    """`stored` says what becomes of keys (0) and values (1) in the cache."""
    generator = torch.Generator().manual_seed(block_size)
    tables = torch.randperm(3 * 18, generator=generator).int().view(3, 18)
    shape = (NUM_LAYERS, 2, 54, NUM_KV_HEADS, block_size, HEAD_DIM)
    kv = torch.full(shape, torch.nan).to(cache)
    scales: KVScales | None = None
    if given is not None:
        scales = KVScales(
            torch.full((NUM_LAYERS, *shape[2:5], 2), torch.nan, dtype=torch.bfloat16), given
        )
    attention = backend_class(kv, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, block_size, scales)
    widths = [heads * HEAD_DIM for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    fused = [
        [torch.randn(length, sum(widths), generator=generator) for length in LENGTHS]
        for _ in range(NUM_LAYERS)
    ]
    outs: list[list[list[Tensor]]] = [[[] for _ in LENGTHS] for _ in range(NUM_LAYERS)]
    computed = [0, 0, 0]
    for new in STEPS:
        step = attention.plan(step_inputs(computed, new, tables, block_size))
        for index in range(NUM_LAYERS):
            rows = [x[c : c + n] for x, c, n in zip(fused[index], computed, new, strict=True)]
            q, k, v = torch.cat(rows).split(widths, dim=-1)
            heads = QKV(*(x.unflatten(-1, (-1, HEAD_DIM)) for x in (q, k, v)))
            out = step.attend(index, heads, HEAD_DIM**-0.5, window).flatten(1)
            for request, piece in enumerate(out.split(new)):
                outs[index][request].append(piece)
        computed = [c + n for c, n in zip(computed, new, strict=True)]
    assert tuple(computed) == LENGTHS
    for index in range(NUM_LAYERS):
        for request in range(len(LENGTHS)):
            q, k, v = fused[index][request].split(widths, dim=-1)
            expected = dense(q, stored(k, 0), stored(v, 1), window)
            out = torch.cat(outs[index][request]).double()
            torch.testing.assert_close(out, expected, rtol=5e-6, atol=5e-6)


def test_native_kernel_comes_first_if_it_can() -> None:
    chosen, reasons = select_backend("cpu", torch.float32, 64, 16)
    missing = CpuBackend.missing()
    if missing is None:
        assert chosen is CpuBackend and reasons == []
    else:
        assert chosen is TorchBackend and reasons == [f"cpu: {missing}"]
    assert chosen.describe().startswith(chosen.support.name)


def test_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the reference runs, and start-up can say why."""
    monkeypatch.setattr(CpuBackend, "missing", classmethod(lambda cls: "was not built"))
    chosen, reasons = select_backend("cpu", torch.float32, 64, 16)
    assert chosen is TorchBackend and reasons == ["cpu: was not built"]


@pytest.mark.parametrize(
    ("device", "dtype", "skipped", "said"),
    [
        ("cuda", torch.float64, "triton", "torch.bfloat16"),
        ("cpu", torch.bfloat16, "cpu", "torch.float32"),
    ],
)
def test_skipped_backends_say_why(device: str, dtype: torch.dtype, skipped: str, said: str) -> None:
    """Only those made for the device count as skipped."""
    chosen, reasons = select_backend(device, dtype, 64, 16)
    assert chosen is TorchBackend
    assert len(reasons) == 1 and reasons[0].startswith(f"{skipped}: ") and said in reasons[0]


@pytest.mark.parametrize("wanted", [None, "cpu", "torch"])
@pytest.mark.parametrize("block_size", [0, 3, 256])
def test_impossible_block_size_names_itself_and_the_backends(
    block_size: int, wanted: str | None
) -> None:
    with pytest.raises(OptionError) as error:
        select_backend("cpu", torch.float32, 64, block_size, wanted=wanted)
    message = str(error.value)
    assert f"block_size={block_size}" in message and "4, 8, 16, 32, 64, 128" in message
    for name in ("cpu", "torch"):
        assert (f"{name}: " in message) == (wanted in (None, name))


def test_wanted_backend_is_taken_or_refused() -> None:
    assert select_backend("cpu", torch.float32, 64, 16, wanted="torch") == (TorchBackend, [])
    with pytest.raises(OptionError, match=r"attention_backend='flash'.*cpu, torch"):
        select_backend("cpu", torch.float32, 64, 16, wanted="flash")
    with pytest.raises(OptionError, match="cpu: runs on cpu, not cuda"):
        select_backend("cuda", torch.float32, 64, 16, wanted="cpu")


def test_everything_declared_is_checked() -> None:
    support = BackendSupport(
        "x", ("cpu",), (torch.float32,), (), (16,), (64,), False, True, False, True, False
    )
    asked = ("cpu", torch.float32, 64, 16, None, torch.float32)
    assert backend.unsupported(support, *asked) is None
    for index, value, said in (
        (0, "cuda", "cuda"),
        (1, torch.float16, "float16"),
        (2, 80, "80"),
        (3, 8, "block_size"),
        (4, 512, "window"),
        (5, torch.float16, "float16"),
    ):
        changed = [*asked]
        changed[index] = value
        reason = backend.unsupported(support, *changed)
        assert reason is not None and said in reason


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_groups_of_latents_have_a_backend_of_their_own(cache: torch.dtype) -> None:
    """By the same name; that the other one is for other layers is no reason to mention it."""
    if LatentBackend.missing() is not None:
        pytest.skip("needs triton")
    asked = ("cuda", torch.bfloat16, 576, 16)
    for wanted in (None, "triton"):
        chosen = select_backend(*asked, wanted=wanted, cache_dtype=cache, is_latent=True)
        assert chosen == (LatentBackend, [])
        chosen = select_backend(*asked, wanted=wanted, cache_dtype=cache)
        assert chosen == (TritonBackend, [])
    with pytest.raises(OptionError) as error:
        select_backend("cuda", torch.float64, 576, 16, wanted="triton", is_latent=True)
    assert str(error.value).count("triton: computes in") == 1
