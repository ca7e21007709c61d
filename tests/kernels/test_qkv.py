"""QKV on the way into attention: the library does what the references do one after the other."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.attention import QKVStep, kv_addresses
from quire.kernels.cpu.sampling import largest
from quire.kernels.torch import attention as reference
from quire.kernels.torch.qkv import rms_norm, rotate
from tests.kernels.pages import Case, make_pages

pytestmark = pytest.mark.usefixtures("native")
EPS = 1e-6
REQUESTS = ((1, 40), (9, 9), (1, 1), (33, 70), (1, 200))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("head_dim", [64, 4, 36, 128])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("rotates", [None, "halves", "part", "neighbours"])
@pytest.mark.parametrize("narrow", [False, True])
def test_prepares_stores_and_attends(
    threads: int,
    head_dim: int,
    norms: bool,
    rotates: str | None,
    narrow: bool,
    isa: str,
    num_threads: None,
    poisoned_memory: None,
) -> None:
    torch.set_num_threads(threads)
    case = Case(REQUESTS, num_heads=6, num_kv_heads=2, head_dim=head_dim, narrow=narrow)
    pages = make_pages(case)
    _, kv_layer, query_start, context_lens, tables = pages.arguments()
    num_tokens = int(query_start[-1])
    positions = torch.cat([torch.arange(n - new, n) for new, n in REQUESTS])
    owner = torch.repeat_interleave(torch.arange(len(REQUESTS)), query_start.diff().long())
    slots = tables[owner, positions // 16].long() * 16 + positions % 16
    joined = torch.randn(num_tokens, 10, head_dim)
    q, k, v = joined.clone().split((6, 2, 2), dim=1)
    pairs = head_dim // 4 if rotates == "part" else head_dim // 2 - (rotates == "neighbours")
    cos, sin = torch.rand(2, 300, pairs)
    interleaved = rotates == "neighbours"
    weights = torch.randn(2, head_dim)

    expected_layer = kv_layer.clone()
    eq, ek, ev = joined.split((6, 2, 2), dim=1)
    if norms:
        eq, ek = rms_norm(eq, weights[0], EPS), rms_norm(ek, weights[1], EPS)
    if rotates:
        angles = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        eq, ek = rotate(eq, *angles, interleaved), rotate(ek, *angles, interleaved)
    reference.write_kv(expected_layer, ek, ev, slots)

    step = QKVStep(kv_layer, slots, query_start, context_lens, tables)
    if rotates:
        step.set_rotation(cos, sin, positions, interleaved)
    if norms:
        step.set_norms(weights[0], weights[1], EPS)
    found = step.attend(kv_addresses(kv_layer), q, k, v, case.scale, None)
    # What is computed a little differently may be rounded to the next float16.
    bounds = {"rtol": 1e-3, "atol": 1e-6} if narrow else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(kv_layer, expected_layer, **bounds, equal_nan=True)
    expected = reference.paged_attention(
        eq, kv_layer, query_start, context_lens, tables, case.scale
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_refuses_tables_of_another_size() -> None:
    kv_layer = torch.zeros(2, 4, 1, 16, 8)
    ints = torch.zeros(2, dtype=torch.int32)
    slots = torch.zeros(1, dtype=torch.int64)
    step = QKVStep(kv_layer, slots, ints, ints[:1], ints.view(1, 2))
    with pytest.raises(ValueError, match="rotation tables"):
        step.set_rotation(torch.ones(5, 5), torch.ones(5, 5), slots)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("width", [1, 15, 16, 100, 1024, 1025, 5000])
def test_largest_is_argmax(width: int, threads: int, isa: str, num_threads: None) -> None:
    torch.set_num_threads(threads)
    scores = torch.randn(60, width)
    scores[1:20] = torch.randint(0, 3, (19, width)).float()  # many equals
    scores[20] = -torch.inf
    scores[21, width // 2] = torch.inf
    scores[22, width // 3 :] = torch.nan
    scores[23] = torch.nan
    assert torch.equal(largest(scores).long(), scores.argmax(-1))
    wide = torch.randn(60, width + 7)
    assert torch.equal(largest(wide[:, 3 : 3 + width]).long(), wide[:, 3 : 3 + width].argmax(-1))
