"""Tokens drawn by the native library: those that its plain-torch reference draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from quire.kernels import dispatch
from quire.kernels.cpu.sampling import sample_tokens
from quire.kernels.torch import sampling as reference
from quire.kernels.torch.noise import draw_keys, hash_tokens, uniform
from quire.kernels.torch.sampling import Kinds, RowSettings, merge_scratch

pytestmark = pytest.mark.usefixtures("native")
CPU = torch.device("cpu")

Way = tuple[float, int, float, float]
"""temperature, top_k, top_p, min_p"""
PLAIN: list[Way] = [(temperature, 0, 1.0, 0.0) for temperature in (0.01, 0.3, 1.0, 1.7, 100.0)]
FILTERED: list[Way] = [
    *product((1.0,), (0, 2, 50, 3000), (1.0, 0.999999, 0.9, 0.3, 1e-6), (0.0, 0.02, 1.0)),
    *product((0.01, 0.6, 100.0), (0, 9), (1.0, 0.95), (0.0, 1e-4)),
]
GREEDY: list[Way] = [(0.0, 0, 1.0, 0.0), (0.0, 50, 0.5, 0.5)]
WAYS = PLAIN + FILTERED + GREEDY


def settings_of(ways: list[Way]) -> RowSettings:
    """Row i chooses in the i-th way, with a seed of its own."""
    columns = torch.tensor(ways, dtype=torch.float32).T.contiguous()
    seeds = torch.arange(len(ways), dtype=torch.int32)
    return RowSettings(
        temperature=columns[0],
        seed_low=seeds * 77 - 5,
        seed_high=-seeds,
        top_k=columns[1].int(),
        top_p=columns[2],
        log_min_p=columns[3].log(),
        scratch=merge_scratch(1, CPU),
    )


def check(logits: Tensor, ways: list[Way], num_draws: int = 1) -> None:
    """Line i chooses in the way of i, several times over the positions and in rows of any order."""
    settings = settings_of(ways)
    rows = torch.randperm(len(ways), generator=torch.Generator().manual_seed(9))
    before = logits.clone()
    for draw in range(num_draws):
        positions = torch.arange(len(ways), dtype=torch.int32) * 1000 + draw
        found = sample_tokens(logits, rows, positions, settings)
        expected = reference.sample_tokens(logits, rows, positions, settings)
        wrong = [
            (ways[int(rows[line])], int(found[line]), int(expected[line]))
            for line in (found != expected).nonzero()[:, 0].tolist()
        ]
        assert found.dtype == torch.int32
        assert not wrong, f"{len(wrong)} of {len(ways)} lines differ: {wrong[:5]}"
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


def random_logits(count: int, vocab: int, spread: float, seed: int = 1) -> Tensor:
    """Lines within wider ones, a few tokens of which are forbidden."""
    logits = torch.randn(count, vocab + 5, generator=torch.Generator().manual_seed(seed)) * spread
    logits[:, 5:9] = -math.inf
    return logits[:, 2 : vocab + 2]


@pytest.mark.parametrize("threads", range(1, 9))
def test_any_number_of_threads(threads: int, isa: str, num_threads: None) -> None:
    torch.set_num_threads(threads)
    check(random_logits(len(WAYS), 2503, 2.0), WAYS)


@pytest.mark.parametrize("vocab", [*range(8, 42), 127, 255, 1000, 4097])
def test_odd_vocabularies(vocab: int, isa: str) -> None:
    check(random_logits(len(WAYS), vocab, 1.5), WAYS)


@pytest.mark.parametrize("spread", [1e-3, 0.1, 1.0, 4.0, 30.0])
def test_flat_and_steep_lines(spread: float, isa: str) -> None:
    """From lines where most of the vocabulary is kept to those where one token is."""
    check(random_logits(len(WAYS), 6007, spread), WAYS, num_draws=3)


def few(x: Tensor, *ids: int) -> Tensor:
    """All but these tokens forbidden."""
    kept = torch.full_like(x, -math.inf)
    kept[list(ids)] = x[list(ids)]
    return kept


ODD_LINES: dict[str, Callable[[Tensor], Tensor]] = {
    "all equal": lambda x: torch.full_like(x, 1.5),
    "ties": lambda x: (x * 2).round() / 2,
    "two values": lambda x: (x > 1).float() * 3,
    "one token allowed": lambda x: few(x, 40),
    "two tokens allowed": lambda x: few(x, 7, len(x) - 1),
    "no token allowed": lambda x: torch.full_like(x, -math.inf),
    "a far lowest logit": lambda x: torch.cat([x[1:], x.new_tensor([-3e38])]),
    "a far highest logit": lambda x: torch.cat([x[1:], x.new_tensor([300.0])]),
    "the lowest of all": lambda x: torch.full_like(x, torch.finfo(torch.float32).min),
    "negative zeros": lambda x: x.clamp(-1, 0) * 0.0 - (x > 2).float() * 0.0,
    "a narrow range": lambda x: 20 + x * 1e-5,
    "rising": lambda x: x.sort().values,
    "falling": lambda x: x.sort(descending=True).values,
    "infinity": lambda x: x.masked_fill(x > 2, math.inf),
    "not a number": lambda x: x.masked_fill(x > 2, math.nan),
    "nothing but that": lambda x: torch.full_like(x, math.nan),
    "infinity and that": lambda x: x.masked_fill(x > 2, math.inf).masked_fill(x < -2, math.nan),
    "beyond the range once tempered": lambda x: x * 3e37,
}


@pytest.mark.parametrize("name", ODD_LINES)
def test_odd_lines(name: str, isa: str) -> None:
    base = torch.randn(1501, generator=torch.Generator().manual_seed(2))
    check(ODD_LINES[name](base).repeat(len(WAYS), 1), WAYS, num_draws=3)


def test_equals_go_to_the_lowest_token(isa: str) -> None:
    """Logits so large that the noise is lost in their rounding."""
    logits = torch.full((3, 500), 3e12)
    logits[:, :100] = 1.0
    check(logits, [(1.0, 0, 1.0, 0.0), (1.0, 9, 1.0, 0.0), (0.5, 0, 0.9, 0.0)])
    settings, rows = settings_of([(1.0, 0, 1.0, 0.0)] * 3), torch.arange(3)
    assert sample_tokens(logits, rows, rows.int(), settings).tolist() == [100] * 3


@pytest.mark.parametrize("where", [0, 1])
def test_every_token_can_win(where: int, isa: str) -> None:
    """The noise is compared with a quick bound first, which must never rule out who wins: also
    where `w` is as small, or all are as large, as they get."""
    count, vocab = 4000, (20, 3)[where]
    settings = settings_of([(1.0, 0, 1.0, 0.0)] * count)
    rows, logits = torch.arange(count), torch.zeros(count, vocab)
    keys = draw_keys(settings.seed_low, settings.seed_high, rows.int())
    w = uniform(hash_tokens(vocab, CPU), *keys)
    assert float(w.min()) < 1e-3
    assert float(w.amin(1).max()) > (0.2, 0.8)[where]
    found = sample_tokens(logits, rows, rows.int(), settings)
    assert torch.equal(found.long(), w.argmin(1))  # noise falls with `w`


def test_usual_vocabulary_in_one_batch_of_all_kinds(isa: str) -> None:
    """Few and many lines, so that they are chosen for by one thread and by several."""
    vocab, ways = 49_152, [PLAIN[1], FILTERED[5], GREEDY[0], FILTERED[20], PLAIN[2], FILTERED[-1]]
    logits = random_logits(len(ways), vocab, 3.0)
    check(logits, ways)
    check(logits[:1], ways[:1])


def test_logits_of_another_type_are_chosen_from_in_torch() -> None:
    logits = random_logits(len(WAYS), 300, 2.0).to(torch.bfloat16)
    settings, rows = settings_of(WAYS), torch.arange(len(WAYS))
    found = dispatch.sample_tokens(logits, rows, rows.int(), settings, Kinds(True, True, True))
    assert torch.equal(found, reference.sample_tokens(logits, rows, rows.int(), settings))


@pytest.mark.parametrize("name", ["seed_low", "top_k", "temperature", "log_min_p"])
def test_refuses_settings_of_another_shape_or_type(name: str) -> None:
    settings, rows = settings_of(WAYS[:4]), torch.arange(4)
    good = getattr(settings, name)
    for bad in (good.double(), good[:3], good.repeat(2)[::2]):
        fields = {**vars(settings), name: bad}
        with pytest.raises(ValueError, match=name):
            sample_tokens(torch.zeros(4, 9), rows, rows.int(), RowSettings(**fields))
    with pytest.raises(ValueError, match="rows"):
        sample_tokens(torch.zeros(4, 9), rows.int(), rows.int(), settings)
