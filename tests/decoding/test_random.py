"""Random numbers: as specified, well distributed, fixed by seed, position and token alone.

All seeds are fixed, so that these tests are not random themselves; bounds are 99.9 % quantiles.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire.kernels.torch.noise import draw_keys, gumbel, hash_tokens, uniform
from quire.protocol.sampling import SamplingParams
from tests.decoding import reference
from tests.decoding.table import Sketch, Table, random_logits

CPU = torch.device("cpu")


def draw_uniforms(seeds: list[int], positions: list[int], num_tokens: int) -> NDArray[np.float32]:
    """w[line, token] for pairs of seed and position."""
    words = np.array(seeds, np.uint64).view(np.int32).reshape(-1, 2)
    low, high = (torch.from_numpy(word.copy()) for word in words.T)
    keys = draw_keys(low, high, torch.tensor(positions, dtype=torch.int32))
    return uniform(hash_tokens(num_tokens, CPU), *keys).numpy()


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64] | float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_bound(freedom: int) -> float:
    """Wilson-Hilferty's approximation of the 99.9 % quantile."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


def test_bits_are_those_of_the_specification():
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    positions = [0, 1, 2, 3, 1000, 2**20, 2**31 - 1, 77]
    got = draw_uniforms(seeds, positions, 500)
    for line, seed, position in zip(got, seeds, positions, strict=True):
        want = [reference.uniform(seed, position, token) for token in range(500)]
        assert line.tolist() == [float(w) for w in want]


def test_noise_is_finite_at_the_ends_of_its_range():
    """No token may win, or lose, for ever by its noise alone."""
    w = torch.tensor([2.0**-32, 1 - 2.0**-24])
    ends = -torch.log(-torch.log1p(-w))
    assert torch.isfinite(ends).all()
    assert ends[0] < 23
    assert ends[1] > -3
    noise = gumbel(hash_tokens(100_000, CPU), torch.arange(20).int(), torch.arange(20).int())
    assert torch.isfinite(noise).all()


def test_uniforms_are_uniform():
    w = draw_uniforms(list(range(20)), [5] * 20, 50_000).ravel()
    counts = np.histogram(w, 1000, (0, 1))[0]
    assert chi_square(counts, len(w) / 1000) < chi_square_bound(999)
    # The smallest values make the largest noise.
    small = np.histogram(w[w < 1e-3], 50, (0, 1e-3))[0]
    assert chi_square(small, len(w) / 1000 / 50) < chi_square_bound(50)
    assert abs(w.mean() - 0.5) < 3.3 * math.sqrt(1 / 12 / len(w))


@pytest.mark.parametrize("neighbour", ["seed", "high_seed", "position", "token", "seed_position"])
@pytest.mark.parametrize("distance", [1, 2, 256])
def test_neighbours_are_independent(neighbour, distance):
    """Contingency table of the numbers of neighbouring seeds, positions or tokens."""
    lines, vocab = 100, 2000
    seeds, positions = list(range(lines)), [9] * lines
    other_seeds, other_positions = seeds, positions
    if neighbour in ("seed", "seed_position"):
        other_seeds = [seed + distance for seed in seeds]
    if neighbour == "high_seed":
        other_seeds = [seed + (distance << 32) for seed in seeds]
    if neighbour in ("position", "seed_position"):
        other_positions = [position + distance for position in positions]
    a = draw_uniforms(seeds, positions, vocab)
    b = draw_uniforms(other_seeds, other_positions, vocab)
    if neighbour == "token":
        b = np.roll(a, -distance, axis=1)
    cells = (a * 32).astype(int) * 32 + (b * 32).astype(int)
    counts = np.bincount(cells.ravel(), minlength=1024)
    assert chi_square(counts, a.size / 1024) < chi_square_bound(1023)
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 3.3 / math.sqrt(a.size)


def test_one_token_along_positions_is_independent():
    """What a fixed token sees as its request grows: serial pairs and runs over 40k positions."""
    count = 40_000
    for token, seed in ((0, 0), (1, 0), (13, 12345)):
        w = draw_uniforms([seed] * count, list(range(count)), 14)[:, token]
        counts = np.histogram(w, 200, (0, 1))[0]
        assert chi_square(counts, count / 200) < chi_square_bound(199)
        pairs = (w[:-1] * 16).astype(int) * 16 + (w[1:] * 16).astype(int)
        assert chi_square(np.bincount(pairs, minlength=256), (count - 1) / 256) < chi_square_bound(
            255
        )


def draw_tokens(logits: NDArray[np.float32], num_draws: int, **params: float) -> list[int]:
    """Tokens of one request at many positions, drawn from the same logits."""
    table = Table(len(logits), max_rows=1000)
    request = Sketch(SamplingParams(**params), [1], seed=2024)
    for row in range(1000):
        table.add(row, request)
    tokens: list[int] = []
    for start in range(0, num_draws, 1000):
        table.num_tokens.copy_(torch.arange(start, start + 1000))
        tokens += table.sample(np.tile(logits, (1000, 1)), list(range(1000))).tokens.tolist()
    return tokens


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.6, "min_p": 1e-9}])
def test_tokens_follow_their_probabilities(kernels, params):
    logits = random_logits(3, 12, spread=0.5)
    counts = np.bincount(draw_tokens(logits, 20_000, **params), minlength=12)
    probs = np.exp(logits.astype(np.float64) / params["temperature"])
    expected = 20_000 * probs / probs.sum()
    assert expected.min() > 5
    assert chi_square(counts, expected) < chi_square_bound(11)


def test_filtered_tokens_follow_their_renormalised_probabilities(kernels):
    logits = random_logits(4, 50, spread=1.0)
    counts = np.bincount(draw_tokens(logits, 20_000, top_k=9, top_p=0.8), minlength=50)
    kept = sorted(reference.kept_tokens(logits, 9, 0.8, 0.0))
    probs = np.exp(logits[kept].astype(np.float64))
    assert counts.sum() == counts[kept].sum()
    assert chi_square(counts[kept], 20_000 * probs / probs.sum()) < chi_square_bound(len(kept) - 1)


def test_a_flat_large_vocabulary_is_drawn_evenly(kernels):
    """Ties and coarse steps in the noise would show here, as a preference for low ids."""
    tokens = np.array(draw_tokens(np.zeros(20_000, np.float32), 1_000))
    counts = np.histogram(tokens, 20, (0, 20_000))[0]
    assert chi_square(counts, 50) < chi_square_bound(19)
