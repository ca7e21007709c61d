"""Prefill kernels as a GPU compiles them: dense attention, and no slot read that is not theirs.

Matrix products, their layouts and the overlap of loads with arithmetic exist only natively; the
interpreter's tests cannot see a fault in them.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from quire.layers.attention.triton import query_tiles
from quire.layers.attention.triton_prefill import PrefillKernel, choose_prefill, is_hopper
from tests.kernels.pages import Case, dense_attention, make_pages

pytestmark = pytest.mark.gpu

RAGGED = ((300, 300), (129, 700), (2, 40), (1, 9), (64, 64), (33, 1000), (128, 128), (200, 203))
CASES = [
    Case(RAGGED, num_heads=32, num_kv_heads=8, head_dim=128),
    Case(RAGGED, num_heads=4, num_kv_heads=4, head_dim=64, block_size=128),
    Case(RAGGED, num_heads=6, num_kv_heads=2, head_dim=96, block_size=8),
    Case(RAGGED, num_heads=8, num_kv_heads=1, head_dim=80, block_size=32),
    Case(RAGGED, num_heads=8, num_kv_heads=2, head_dim=128, window=1),
    Case(RAGGED, num_heads=8, num_kv_heads=2, head_dim=128, window=100, block_size=64),
    Case(RAGGED, num_heads=8, num_kv_heads=2, head_dim=64, window=300),
    Case(RAGGED, num_heads=4, num_kv_heads=2, head_dim=128, block_size=4),
    Case(RAGGED, num_heads=4, num_kv_heads=2, head_dim=256),
    Case(RAGGED, num_heads=8, num_kv_heads=2, head_dim=128, softcap=0.6),
    Case(RAGGED, num_heads=8, num_kv_heads=4, head_dim=64, softcap=50.0, window=70),
    Case(RAGGED, num_heads=4, num_kv_heads=2, head_dim=256, softcap=0.6, window=70),
    Case(RAGGED, num_heads=64, num_kv_heads=8, head_dim=64, has_sinks=True),
    Case(RAGGED, num_heads=6, num_kv_heads=2, head_dim=64, has_sinks=True, window=128),
    Case(RAGGED, num_heads=4, num_kv_heads=2, head_dim=256, has_sinks=True, window=70),
]


def check(kernel: PrefillKernel, case: Case, dtype: torch.dtype, tolerance: float) -> None:
    pages = make_pages(case, dtype)
    lens = pages.query_start.diff().numpy()
    requests, indices = query_tiles(lens, kernel.queries)
    q, *rest = (tensor.cuda() for tensor in pages.arguments())
    out = torch.full_like(q, torch.nan)
    tiles = (torch.from_numpy(requests).cuda(), torch.from_numpy(indices).cuda())
    sinks = None if case.sinks is None else case.sinks.cuda()
    where = (*rest, *tiles, case.scale, case.window, out)
    kernel.attend(q, *where, softcap=case.softcap, sinks=sinks)
    single = torch.from_numpy(lens == 1).repeat_interleave(torch.from_numpy(lens))
    assert out[single.cuda()].isnan().all(), "single tokens belong to the decode kernel"
    found, expected = out.cpu()[~single].double(), dense_attention(case, pages)[~single]
    assert (found - expected).norm() / expected.norm() < tolerance
    torch.testing.assert_close(found, expected, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.bfloat16) for case in CASES), (CASES[0], torch.float16)],
    ids=str,
)
def test_chosen_kernel(case: Case, dtype: torch.dtype) -> None:
    """What the backend would run here, for heads and blocks of all kinds."""
    kv = make_pages(case, dtype).kv_layer.cuda()[None]
    kernel = choose_prefill(kv, case.num_heads, case.num_kv_heads)
    check(kernel, case, dtype, 5e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_portable_kernel(case: Case) -> None:
    """What GPUs without Hopper's instructions run."""
    from quire.kernels.triton.prefill_attention import PrefillTiles, prefill_attention

    tiles = PrefillTiles(64, 32, num_warps=4, num_stages=2)
    kernel = PrefillKernel(partial(prefill_attention, tiles=tiles), tiles.queries, "portable")
    check(kernel, case, torch.bfloat16, 5e-3)


def test_hopper_kernel_with_few_and_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may have one tile or many, in turns that go back and forth."""
    if not is_hopper(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    from quire.kernels.hopper import prefill_attention as hopper

    case = CASES[0]
    kernel = choose_prefill(make_pages(case).kv_layer.cuda().half()[None], 32, 8)
    assert kernel.attend is hopper.prefill_attention
    for programs in (1, 7, 10_000):
        monkeypatch.setattr(hopper, "_multiprocessors", lambda _, n=programs: n)
        check(kernel, case, torch.float16, 1e-3)
