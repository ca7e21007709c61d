"""Sampling kernels against their plain-torch references: on the GPU, or by Triton's interpreter.

The interpreter takes about 10 ms for each program, so there the lines are few and short, and chunks
are made small enough for a line to have several.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402

from quire.kernels.torch import bitmask as bitmask_reference  # noqa: E402
from quire.kernels.torch import penalties as penalties_reference  # noqa: E402
from quire.kernels.torch import sampling as reference  # noqa: E402
from quire.kernels.torch.noise import hash_tokens, uniform  # noqa: E402
from quire.kernels.torch.penalties import PenaltySettings  # noqa: E402
from quire.kernels.torch.sampling import Kinds, RowSettings, merge_scratch  # noqa: E402
from quire.kernels.triton import bitmask, cutoffs, penalties, sampling  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]
EVERYTHING = Kinds(draws=True, filters=True, searches=True)
MANY = list(product((0.3, 1.0, 1.7), (0, 2, 50, 6000), (1.0, 0.999, 0.9, 0.3, 1e-6), (0, 0.02, 1)))
FEW = [
    # temperature, top_k, top_p, min_p
    (0.7, 0, 0.9, 0.0),
    (1.3, 0, 0.999, 0.02),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 2, 1.0, 0.0),
    (0.9, 50, 0.8, 0.0),
    (1.0, 300, 0.5, 0.01),
    (2.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 0.0),
    (0.0, 50, 0.5, 0.5),
]
"""Of a greedy row the filters are leftovers, and must not matter."""
COMBINATIONS = MANY + FEW if ON_GPU else FEW

pytestmark = pytest.mark.skipif(
    not ON_GPU and not triton.knobs.runtime.interpret,
    reason="needs a GPU, or TRITON_INTERPRET=1 (see tests/kernels/test_triton_interpreter.py)",
)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(sampling, "CHUNK", 256)
        monkeypatch.setattr(sampling, "CHUNK_WITH_NOISE", 256)
        monkeypatch.setattr(cutoffs, "CHUNK", 256)
        monkeypatch.setattr(cutoffs, "MAX_COLLECTED", 128)


def settings_of(combinations: list[tuple[float, int, float, float]]) -> RowSettings:
    """Row i has the i-th combination and a seed of its own."""
    columns = torch.tensor(combinations, dtype=torch.float32, device=DEVICE).T.contiguous()
    seeds = torch.arange(len(combinations), dtype=torch.int32, device=DEVICE)
    return RowSettings(
        columns[0],
        seeds * 77 - 5,
        -seeds,
        columns[1].int(),
        columns[2],
        columns[3].log(),
        merge_scratch(len(combinations), DEVICE),
    )


def kept(logits: Tensor, cutoff: Tensor, settings: RowSettings) -> Tensor:
    """Which tokens may be drawn; a row that takes the highest logit filters nothing."""
    tempered = logits.float() / settings.temperature[:, None]
    return (tempered >= cutoff[:, None]) | (settings.temperature[:, None] == 0)


def check_cutoffs(logits: Tensor, combinations: list[tuple[float, int, float, float]]) -> None:
    settings = settings_of(combinations)
    rows = torch.arange(len(combinations), device=DEVICE)
    found = cutoffs.token_cutoffs(logits, rows, settings, EVERYTHING)
    expected = reference.token_cutoffs(logits, rows, settings)
    differ = kept(logits, found, settings) != kept(logits, expected, settings)
    wrong = [combinations[line] for line in differ.any(1).nonzero()[:, 0].tolist()]
    assert not wrong, f"{len(wrong)} of {len(combinations)} kept sets differ: {wrong[:5]}"


SHAPES = [(128256, 3.0), (5003, 0.1), (32000, 10.0)] if ON_GPU else [(500, 2.0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "spread"), SHAPES)
def test_kept_sets(vocab: int, spread: float, dtype: torch.dtype, small_chunks: None) -> None:
    """Few or many tokens kept, forbidden ones among them, and sizes that no chunk divides."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(COMBINATIONS), vocab, generator=generator) * spread
    logits[:, 20:90] = -math.inf
    check_cutoffs(logits.to(DEVICE, dtype), COMBINATIONS)


ODD_LINES = {
    "all equal": lambda x: torch.full_like(x, 1.5),
    "ties": lambda x: (x * 2).round() / 2,
    "two values": lambda x: (x > 1).float() * 3,
    "one finite": lambda x: torch.full_like(x, -math.inf).index_fill_(0, torch.tensor([40]), 2.0),
    "none finite": lambda x: torch.full_like(x, -math.inf),
    "a far lowest logit": lambda x: torch.cat([x[1:], x.new_tensor([-3e38])]),
    "a far highest logit": lambda x: torch.cat([x[1:], x.new_tensor([300.0])]),
    "negative zeros": lambda x: x.clamp(-1, 0) * 0.0 - (x > 2).float() * 0.0,
    "a narrow range": lambda x: 20 + x * 1e-5,
}


@pytest.mark.parametrize("name", ODD_LINES)
def test_kept_sets_of_odd_lines(name: str, small_chunks: None) -> None:
    """Ties stay or go together; a line of equals, or without any token, is no trap."""
    combinations = COMBINATIONS if ON_GPU else [(0.8, 0, 0.9, 0.0), (1.0, 20, 0.5, 0.0)]
    base = torch.randn(9001 if ON_GPU else 300, generator=torch.Generator().manual_seed(2))
    line = ODD_LINES[name](base)
    check_cutoffs(line.repeat(len(combinations), 1).to(DEVICE), combinations)


@pytest.mark.parametrize("dtype", DTYPES)
def test_choices(dtype: torch.dtype, small_chunks: None) -> None:
    """Greedy, plain and filtered lines in one call, in rows of any order; twice, so that the first
    call must leave the scratch as it found it."""
    combinations = COMBINATIONS if ON_GPU else [FEW[0], FEW[4], FEW[6], FEW[7], FEW[8]]
    count, vocab = len(combinations), 128256 if ON_GPU else 390
    settings = settings_of(combinations)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randperm(count, generator=generator).to(DEVICE)
    for step in range(2):
        logits = (torch.randn(count, vocab + 8, generator=generator) * 2).to(DEVICE, dtype)
        logits = logits[:, :vocab]
        positions = torch.arange(count, dtype=torch.int32, device=DEVICE) * 1000 + step
        found = sampling.sample_tokens(logits, rows, positions, settings, EVERYTHING)
        expected = reference.sample_tokens(logits, rows, positions, settings)
        assert found.dtype == torch.int32
        assert found.tolist() == expected.tolist()
    assert torch.equal(settings.scratch, merge_scratch(count, DEVICE))


def test_greedy_choices(small_chunks: None) -> None:
    """The first of equals, across chunks; a NaN, or nothing allowed, still gives a token."""
    vocab = 9001 if ON_GPU else 700
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(4))
    logits[0, 650], logits[0, 3] = 9.0, 9.0
    logits[1] = -1.0
    logits[1, 77], logits[1, 300] = -0.0, 0.0
    logits[2] = -math.inf
    logits[3] = math.nan
    expected = [3, 77, 0, 0, int(logits[4].argmax())]
    settings = settings_of([(0.0, 0, 1.0, 0.0)] * 5)
    rows = torch.arange(5, device=DEVICE)
    found = sampling.sample_tokens(
        logits.to(DEVICE), rows, rows.int(), settings, Kinds(False, False, False)
    )
    assert found.tolist() == expected


@triton.jit
def noise_kernel(out_ptr, key0, key1, WIDTH: tl.constexpr):
    tokens = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out_ptr + tokens, sampling._gumbel(tokens, key0.to(tl.uint32), key1.to(tl.uint32)))


def test_noise_has_the_precision_of_float32() -> None:
    """All over its range, above all where the uniform number is tiny and the noise largest."""
    width, programs = (1024, 256) if ON_GPU else (1 << 17, 1)
    out = torch.empty(width * programs, device=DEVICE)
    noise_kernel[(programs,)](out, 12345, 678910, WIDTH=width)
    keys = [torch.tensor([key], dtype=torch.int32, device=DEVICE) for key in (12345, 678910)]
    w = uniform(hash_tokens(len(out), DEVICE), *keys)[0].double()
    exact = -torch.log(-torch.log1p(-w))
    assert float(w.min()) < 1e-4
    assert ((out.double() - exact).abs() < 5e-7 * exact.abs().clamp_min(1)).all()


def test_penalties() -> None:
    """Bit for bit, in the lines whose rows have a slot, and nowhere else."""
    generator = torch.Generator().manual_seed(5)
    vocab = 5003 if ON_GPU else 2500
    logits = (torch.randn(4, vocab, generator=generator) * 5).to(DEVICE)
    logits[:, ::7] = -math.inf
    uses = torch.randint(-6, 7, (3, vocab), generator=generator).clamp_min(0).int().to(DEVICE)
    settings = PenaltySettings(
        torch.tensor([0, 2, 0, 1, 2], dtype=torch.int32, device=DEVICE),
        torch.tensor([9.0, 1.3, 9.0, 1.0, 0.7], device=DEVICE),
        torch.tensor([9.0, 0.37, 9.0, -0.7, 0.0], device=DEVICE),
        torch.tensor([9.0, 0.21, 9.0, 0.0, 1.1], device=DEVICE),
    )
    rows = torch.tensor([3, 0, 1, 4], device=DEVICE)
    expected = logits.clone()
    penalties_reference.penalize(expected, rows, uses, settings)
    penalties.penalize(logits, rows, uses, settings)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_uses_are_counted(dtype: torch.dtype) -> None:
    """A row may occur more than once; rows without a slot count nowhere that is read."""
    slots = torch.tensor([0, 2, 1], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([1, 0, 1, 2, 1], dtype=dtype, device=DEVICE)
    tokens = torch.tensor([4, 4, 4, 5, 0], dtype=torch.int32, device=DEVICE)
    found, expected = (torch.ones(3, 6, dtype=torch.int32, device=DEVICE) for _ in range(2))
    penalties.count_uses(found, rows, tokens, slots)
    penalties_reference.count_uses(expected, rows, tokens, slots)
    assert torch.equal(found[1:], expected[1:])


@pytest.mark.parametrize(("vocab_size", "num_words"), [(320, 10), (333, 11), (333, 9)])
@pytest.mark.parametrize("lines", [[0, 1, 2, 3], [3, 1]])
def test_bitmask(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, num_words: int, lines: list[int]
) -> None:
    """Masks reach their own lines only; what no word covers is forbidden."""
    monkeypatch.setattr(bitmask, "BLOCK", 256)
    generator = torch.Generator().manual_seed(vocab_size + num_words)
    bits = torch.randint(
        -(2**31), 2**31, (len(lines), num_words), dtype=torch.int32, generator=generator
    )
    logits = torch.randn((4, vocab_size), generator=generator)
    expected = logits.clone()
    for i, line in enumerate(lines):
        for token in range(vocab_size):
            word = int(bits[i, token // 32]) if token < 32 * num_words else 0
            if not word >> token % 32 & 1:
                expected[line, token] = -math.inf
    where = torch.tensor(lines, dtype=torch.int32)
    by_reference, by_kernel = logits.clone(), logits.to(DEVICE)
    bitmask_reference.apply_bitmask(by_reference, where, bits)
    bitmask.apply_bitmask(by_kernel, where.to(DEVICE), bits.to(DEVICE))
    assert torch.equal(by_reference, expected)
    assert torch.equal(by_kernel.cpu(), expected)
