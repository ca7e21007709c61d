"""The backends of a CPU and dense attention agree, and no request reads what is not its own.

They are driven as the engine does it: a planned step stores its keys and values, then attends. A
change that reads a slot outside a request's tokens or window, leaves an output element or a new
token unwritten, loses a mask, a tail or a part of a split, or lets one request's neighbours touch
its rounding turns these red.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.cpu.attention import STORED
from quire.kernels.torch import attention as reference
from quire.layers.attention.backend import AttentionBackend
from quire.layers.attention.cpu import CpuBackend
from quire.layers.attention.torch import TorchBackend
from tests.kernels.pages import Case, Step, attend, dense_attention, make_pages

Backend = type[AttentionBackend]

HEADS = ((1, 1), (3, 1), (4, 4), (9, 3), (8, 2), (7, 1), (16, 2), (20, 1))


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int]:
    """Mostly decoding and small chunks, some with a long past."""
    num_queries = draw(st.one_of(st.just(1), st.integers(0, 9), st.integers(10, 70)))
    past = draw(st.one_of(st.integers(0, 20), st.integers(21, 300)))
    return num_queries, num_queries + past


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_heads, num_kv_heads = draw(st.sampled_from(HEADS))
    return Case(
        requests=tuple(draw(st.lists(requests(), min_size=1, max_size=4))),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from((64, 80, 96, 128, 256, 4, 18, 33, 72))),
        block_size=draw(st.sampled_from((4, 8, 16, 32, 64, 128))),
        window=draw(st.sampled_from((None, None, 1, 5, 64, 100))),
        softcap=draw(st.sampled_from((None, None, 0.4, 50.0))),
        has_sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2)),
        narrow=draw(st.booleans()),
    )


def check(backend: Backend, case: Case, dtype: torch.dtype = torch.float32) -> None:
    pages = make_pages(case, dtype)
    out = attend(backend, case, pages)
    assert out.dtype == dtype and out.is_contiguous()
    tolerance = {torch.float32: 5e-6, torch.float64: 1e-12, torch.float16: 2e-3}.get(dtype, 2e-2)
    torch.testing.assert_close(
        out.double(), dense_attention(case, pages), rtol=tolerance, atol=tolerance
    )


several_examples = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(cases())
@several_examples
def test_torch_is_dense_attention(case: Case) -> None:
    check(TorchBackend, case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_torch_takes_any_dtype(dtype: torch.dtype) -> None:
    check(TorchBackend, Case(((1, 40), (5, 9), (20, 60)), window=30), dtype)


def test_torch_result_does_not_depend_on_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prefills are cut to bound memory; a cut must not move the mask or the window."""
    monkeypatch.setattr(reference, "MAX_QUERIES_AT_ONCE", 7)
    check(TorchBackend, Case(((33, 50), (7, 7), (8, 90)), window=12))


@given(case=cases(), threads=st.integers(1, 4))
@example(case=Case(((0, 0), (0, 5), (1, 1))), threads=2)
@several_examples
def test_kernel_is_dense_attention(
    isa: str, poisoned_memory: None, num_threads: None, case: Case, threads: int
) -> None:
    torch.set_num_threads(threads)
    check(CpuBackend, case)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("window", [None, 50, 1000])
@pytest.mark.parametrize(
    "request_",
    [(1, 127), (1, 128), (1, 129), (1, 1025), (2, 700), (4, 385), (9, 1030), (70, 2100)],
)
def test_split_contexts(
    isa: str, poisoned_memory: None, request_: tuple[int, int], window: int | None, narrow: bool
) -> None:
    """Long contexts are split among threads and joined: at, before and after the cuts."""
    shape = {"num_heads": 2, "num_kv_heads": 2}
    case = Case((request_,), **shape, window=window, narrow=narrow, has_sinks=narrow)
    check(CpuBackend, case)


def test_no_requests(isa: str) -> None:
    check(CpuBackend, Case(()))


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("backend", [CpuBackend, TorchBackend])
def test_result_does_not_depend_on_the_batch(
    native: None, num_threads: None, backend: Backend, narrow: bool
) -> None:
    """Bitwise: alone or among others, in any order, with any number of threads."""
    steps = ((1, 300), (1, 17), (5, 200), (64, 64), (100, 1100), (3, 3))
    case = Case(steps, num_heads=9, num_kv_heads=3, narrow=narrow, has_sinks=narrow)
    pages = make_pages(case)
    together = attend(backend, case, pages)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for index, request in enumerate(case.requests):
            for others in ((), case.requests[:2]):
                smaller = replace(case, requests=(request, *others))
                alone = attend(backend, smaller, make_pages(smaller))
                start, end = pages.query_start[index : index + 2].tolist()
                assert torch.equal(alone[: request[0]], together[start:end])


@given(
    case=cases(),
    cuts=st.lists(st.integers(1, 69), max_size=6),
    threads=st.integers(1, 3),
    past=st.sampled_from((0, 0, 250, 900)),
)
@example(
    case=Case(((70, 800),), num_heads=9, num_kv_heads=3, window=600, narrow=True),
    cuts=[1, 2, 4, 9],
    threads=3,
    past=0,
)
@settings(several_examples, max_examples=60)
def test_result_does_not_depend_on_the_chunk(
    isa: str, num_threads: None, case: Case, cuts: list[int], threads: int, past: int
) -> None:
    """Bitwise: the queries of a request at once, or in chunks of any size, which take either way
    through the kernel, and whose keys are shared out to threads or not."""
    num_queries, context = case.requests[0]
    case = replace(case, requests=((num_queries, context + past),))
    pages = make_pages(case)
    torch.set_num_threads(1)
    whole = attend(CpuBackend, case, pages)
    torch.set_num_threads(threads)
    bounds = sorted({0, num_queries, *(cut for cut in cuts if cut < num_queries)})
    k, v, slots = pages.new_tokens()
    for first, end in itertools.pairwise(bounds):
        step = Step(
            CpuBackend,
            pages.kv_layer,
            torch.tensor([0, end - first], dtype=torch.int32),
            pages.context_lens - (num_queries - end),
            pages.block_tables,
            slots[first:end],
        )
        new = pages.q[first:end], k[first:end], v[first:end]
        part = step.attend(*new, case.scale, case.window, case.softcap, case.sinks)
        assert torch.equal(part, whole[first:end])


def test_extreme_scores(isa: str) -> None:
    """Probabilities of 0 and 1, and scores far outside the range of exp."""
    case = Case(((1, 200), (40, 90)), head_dim=64)
    pages = make_pages(case)
    for factor in (1e-6, 30.0, 1e4):
        pages.q *= factor
        out = attend(CpuBackend, case, pages)
        expected = dense_attention(case, pages)
        torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_queries", [1, 30])
def test_nan_stays_in_its_request_and_shows(isa: str, num_queries: int) -> None:
    """A broken request must neither look healthy nor hurt others."""
    case = Case(((num_queries, 70), (num_queries, 80), (num_queries, 90)))
    pages = make_pages(case)
    healthy = attend(CpuBackend, case, pages)
    pages.q[num_queries : 2 * num_queries] = torch.nan
    out = attend(CpuBackend, case, pages)
    assert out[num_queries : 2 * num_queries].isnan().all()
    assert torch.equal(out[:num_queries], healthy[:num_queries])
    assert torch.equal(out[2 * num_queries :], healthy[2 * num_queries :])


@pytest.mark.parametrize("num_queries", [1, 20])
def test_queries_may_be_a_slice_of_a_wider_tensor(native: None, num_queries: int) -> None:
    """Models pass a part of the fused projection without copying it."""
    case = Case(((num_queries, 30), (num_queries, 45)))
    pages = make_pages(case)
    expected = attend(CpuBackend, case, pages)
    fused = torch.full((len(pages.q), 3, *pages.q.shape[1:]), torch.nan)
    fused[:, 1] = pages.q
    pages.q = fused[:, 1]
    assert torch.equal(attend(CpuBackend, case, pages), expected)


def store(backend: Backend, kv_layer: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """A step of requests with one token each, for what it leaves in the cache."""
    count = len(slots)
    starts = torch.arange(count + 1, dtype=torch.int32)
    lens, tables = (torch.full(shape, 1, dtype=torch.int32) for shape in ((count,), (count, 1)))
    step = Step(backend, kv_layer, starts, lens, tables, slots)
    step.attend(torch.zeros_like(k, memory_format=torch.contiguous_format), k, v, 1.0, None)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("backend", [CpuBackend, TorchBackend])
@pytest.mark.parametrize("num_tokens", [0, 1, 33, 3000])
def test_new_tokens_are_stored(
    isa: str, num_threads: None, backend: Backend, num_tokens: int, dtype: torch.dtype
) -> None:
    """New tokens reach their slots, from slices of a fused tensor, to the nearest number of the
    cache's type; other slots stay the same."""
    torch.set_num_threads(2)
    kv_layer = torch.randn(2, 800, 2, 4, 24).to(dtype)
    fused = torch.randn(num_tokens, 5, 2, 24)
    slots = torch.randperm(800 * 4)[:num_tokens]
    expected = kv_layer.clone()
    by_slot = expected.permute(0, 1, 3, 2, 4).flatten(1, 2)
    for token, where in enumerate(slots.tolist()):
        by_slot[0, where], by_slot[1, where] = fused[token, 1], fused[token, 3]
    expected = by_slot.unflatten(1, (800, 4)).permute(0, 1, 3, 2, 4)
    store(backend, kv_layer, fused[:, 1], fused[:, 3], slots)
    assert torch.equal(kv_layer, expected)


# Numbers in float32 and what float16 makes of them: its range, halfway cases, its smallest numbers.
ROUNDED = {
    65504.0: 65504.0,
    65519.0: 65504.0,
    65520.0: 65504.0,
    -1e5: -65504.0,
    3e38: 65504.0,
    torch.inf: 65504.0,
    -torch.inf: -65504.0,
    2049.0: 2048.0,
    2051.0: 2052.0,
    6.2e-5: 1040 * 2.0**-24,
    -3 * 2.0**-25: -(2.0**-23),
    2.0**-25: 0.0,
    1.01 * 2.0**-25: 2.0**-24,
    1e-30: 0.0,
    torch.nan: torch.nan,
}


@pytest.mark.parametrize("backend", [CpuBackend, TorchBackend])
@pytest.mark.parametrize("head_dim", [1, 7, 16, 33])
def test_float16_holds_the_nearest_number_of_its_range(
    isa: str, backend: Backend, head_dim: int
) -> None:
    """Beyond it the largest and not infinity, which would make a NaN of all that see it."""
    given = torch.tensor(list(ROUNDED)).repeat(11)[: 5 * head_dim].view(5, 1, head_dim)
    expected = torch.tensor(list(ROUNDED.values())).repeat(11)[: 5 * head_dim]
    kv_layer = torch.zeros(2, 2, 1, 4, head_dim, dtype=torch.float16)
    store(backend, kv_layer, given, -given, torch.arange(5))
    keys, values = kv_layer.float().flatten(1)[:, : 5 * head_dim]
    torch.testing.assert_close(keys, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, -expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_heads", [1, 30])
@pytest.mark.parametrize("head_dim", [64, 33])
def test_every_float16_is_read_as_it_is(isa: str, num_heads: int, head_dim: int) -> None:
    """One visible key, so that the result is its value: all numbers of the type in turn."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = numbers[numbers.isfinite()]
    num_blocks = -(-len(numbers) // (4 * head_dim))
    kv_layer = torch.zeros(2, num_blocks, 1, 4, head_dim, dtype=torch.float16)
    kv_layer[1].view(-1)[: len(numbers)] = numbers
    tables = torch.arange(num_blocks, dtype=torch.int32)[:, None]
    starts = torch.arange(num_blocks + 1, dtype=torch.int32)
    for offset in range(4):
        lens = torch.full((num_blocks,), offset + 1, dtype=torch.int32)
        q = torch.randn(num_blocks, num_heads, head_dim)
        expected = kv_layer[1, :, :, offset].float()
        slots = 4 * torch.arange(num_blocks) + offset
        step = Step(CpuBackend, kv_layer, starts, lens, tables, slots)
        out = step.attend(q, torch.zeros_like(expected), expected, 1.0, window=1)
        assert torch.equal(out, expected.expand_as(out))


def test_wrong_types_are_refused(native: None) -> None:
    """The library reads memory by address: what does not fit must not get there."""
    case = Case(((1, 30),))
    with pytest.raises(ValueError, match="float32"):
        attend(CpuBackend, case, make_pages(case, torch.bfloat16))
    pages = make_pages(case)
    pages.context_lens = pages.context_lens.long()
    with pytest.raises(ValueError, match="int32"):
        attend(CpuBackend, case, pages)
    k = torch.zeros(1, case.num_kv_heads, case.head_dim)
    with pytest.raises(ValueError, match="int64"):
        store(CpuBackend, pages.kv_layer, k, k, torch.zeros(1, dtype=torch.int32))
