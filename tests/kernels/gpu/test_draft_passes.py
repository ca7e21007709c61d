"""Drafts of a model equal what plain decoding by the same model samples, pass by pass.

The passes are run as they are, and as replays of graphs: on a GPU these are captured, elsewhere a
replay goes through the same passes under Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from quire.decoding.sampler import Sampler  # noqa: E402
from quire.layers.attention import triton as triton_backend  # noqa: E402
from quire.layers.attention.torch import TorchBackend  # noqa: E402
from quire.layers.attention.triton import TritonBackend  # noqa: E402
from quire.layers.parallel import Parallel  # noqa: E402
from quire.protocol.plan import AddedRow, StepPlan  # noqa: E402
from quire.protocol.sampling import SamplingParams  # noqa: E402
from quire.worker.draft_passes import DraftPasses  # noqa: E402
from quire.worker.graphs import StepGraphs  # noqa: E402
from tests.kernels.gpu.test_graph_steps import DEVICE, MAX_LEN, ON_GPU, VOCAB, Side  # noqa: E402

pytestmark = pytest.mark.skipif(
    not ON_GPU and not triton.knobs.runtime.interpret,
    reason="needs a GPU, or TRITON_INTERPRET=1 (see tests/kernels/test_triton_interpreter.py)",
)

MAX_ROWS, SIZE, NUM_DRAFTS = 6, 16, 2
SPARE_BLOCK = 0
"""The one that no row has."""
ROWS = np.array([4, 0, 2], np.int32)
LENGTHS = (5, 30, 15)
"""Of prompts. With one more token and drafts the last one reaches a second block."""
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.9, seed=7)
FILTERED = SamplingParams(temperature=1.2, seed=8, top_k=9, min_p=0.01)
EDITED = SamplingParams(temperature=0.9, seed=9, logit_bias={3: 4.0, 5: 3.0}, bad_words=["x"])
EDITED.bad_words_token_ids = ((3, 5), (5, 3))
CASES = {
    "greedy": (GREEDY, GREEDY, GREEDY),
    "drawn": (DRAWN, GREEDY, DRAWN),
    "filtered": (FILTERED, DRAWN, GREEDY),
    "edited": (EDITED, DRAWN, GREEDY),
}


class Decoding:
    """A side of the comparison: rows, a model, and a sampler for it."""

    def __init__(self, backend: Any, params: tuple[SamplingParams, ...]) -> None:
        self.side = Side(SIZE, MAX_ROWS, (None,), backend)
        self.side.model.lm_head = SimpleNamespace(gather=lambda logits: logits)
        self.table = self.side.table
        self.rows = torch.from_numpy(ROWS).to(DEVICE)
        numbers = self.table.token_ids, self.table.num_tokens
        self.sampler = Sampler(VOCAB, MAX_ROWS, DEVICE, *numbers)
        rng = np.random.default_rng(5)
        added = [
            AddedRow(row, rng.integers(0, VOCAB, n).astype(np.int32), n, 0, one, one.seed or 0)
            for row, n, one in zip(ROWS.tolist(), LENGTHS, params, strict=True)
        ]
        for one in added:
            self.sampler.add(one, one.token_ids)
        samples = np.ones(len(ROWS), np.int32)
        counts = np.array(LENGTHS, np.int32)
        self.prompts = StepPlan(
            0, added_rows=added, rows=ROWS, num_new_tokens=counts, num_samples=samples
        )

    def start(self) -> Tensor:
        """Computes the prompts and samples behind them."""
        return self._sample(self.side.run_eagerly(self.prompts))

    def decode(self) -> Tensor:
        """One more token of each row."""
        ones = np.ones(len(ROWS), np.int32)
        plan = StepPlan(1, rows=ROWS, num_new_tokens=ones, num_samples=ones)
        return self._sample(self.side.run_eagerly(plan))

    def _sample(self, logits: Tensor) -> Tensor:
        return self.sampler.sample(logits, self.rows, ROWS).tokens

    def append(self, tokens: Tensor) -> None:
        self.table.append_sampled(self.rows, tokens.int())

    def cut_back(self, lengths: Tensor) -> None:
        self.table.num_tokens[self.rows] = lengths
        self.table.num_computed[self.rows] = lengths


class _Replay:
    """In place of a captured graph where there is no GPU."""

    def __init__(self, run: Callable[[Any], None], key: Any) -> None:
        self._run, self._key = run, key

    def replay(self) -> None:
        self._run(self._key)


def passes_of(ours: Decoding, longest: int, captured: bool) -> DraftPasses:
    ours.side.kv[:, :, :, SPARE_BLOCK] = 0
    side, table = ours.side, ours.table
    passes = DraftPasses(
        side.model,
        side.attention,
        table,
        table.block_tables[0],
        ours.sampler,
        Parallel(),
        [NUM_DRAFTS],
        VOCAB,
        longest,
        SPARE_BLOCK,
    )
    if captured and ON_GPU:
        passes.capture(passes.all_keys())
    elif captured:
        passes._logits = side.model.new_logits(MAX_ROWS)
        replays: dict[Any, Any] = {key: _Replay(passes._run, key) for key in passes.all_keys()}
        passes._graphs = replays
    return passes


def room_for(blocks: tuple[int, ...]) -> np.ndarray:
    return np.array(blocks, np.int32) * SIZE


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one takes the interpreter a while."""
    if not ON_GPU:
        monkeypatch.setattr(triton_backend, "PROGRAMS_WANTED", 8)
        monkeypatch.setattr(triton_backend, "MIN_SPLITS", 1)


@pytest.mark.parametrize(
    ("case", "captured"),
    [
        ("filtered", True),
        ("edited", True),
        *[("greedy", True), ("drawn", True), ("drawn", False)] * ON_GPU,
    ],
)
def test_drafts_are_what_plain_decoding_samples(case: str, captured: bool) -> None:
    """Three rounds: behind the prompts; with all drafts accepted and a token more; and with some
    rejected, for which other tokens stand in the rows. Graphs have a row of padding. (Elsewhere
    than on a GPU, tests/engine/test_drafts.py has what is not captured.)"""
    ours, reference = (Decoding(kind, CASES[case]) for kind in (TritonBackend, TorchBackend))
    passes, room = passes_of(ours, MAX_LEN, captured), room_for((1, 3, 2))
    tokens = reference.start()
    ours.start()
    for rejected in (False, True, False):
        for side in (ours, reference):
            side.append(tokens)
        known = reference.table.num_tokens[reference.rows].clone()
        expected = []
        for _ in range(NUM_DRAFTS + 1):
            expected.append(reference.decode())
            reference.append(expected[-1])
        found = passes.propose(ROWS, room, NUM_DRAFTS)
        # A draft follows tokens that there must be room for.
        fits = (known[:, None].cpu() + torch.arange(NUM_DRAFTS)) <= torch.from_numpy(room)[:, None]
        drafts = torch.stack(expected, dim=1)
        fits = fits.to(DEVICE)
        assert torch.equal(found, torch.where(fits, drafts[:, :NUM_DRAFTS], -1))
        assert fits.sum() > len(ROWS)
        if rejected:  # in each row behind another number of drafts
            counts = torch.tensor([0, 1, 0], device=DEVICE)
            other = (drafts.gather(1, counts[:, None])[:, 0] + 1) % VOCAB
        else:
            counts = torch.full((len(ROWS),), NUM_DRAFTS, device=DEVICE)
            counts = torch.minimum(counts, fits.sum(1))
            other = drafts.gather(1, counts[:, None])[:, 0]
        accepted = (known + counts).int()
        reference.cut_back(accepted)
        for index, length in enumerate(accepted.tolist()):
            texts = reference.table.token_ids[ROWS[index], :length]
            ours.table.token_ids[ROWS[index], :length] = texts
        ours.cut_back(accepted)
        tokens = other


def test_nothing_is_written_that_belongs_to_others() -> None:
    """Rows write behind their known tokens into blocks of their own; neither padding, nor a row
    that has too few of them or is too long writes anywhere else."""
    ours = Decoding(TritonBackend, CASES["greedy"])
    longest = LENGTHS[1] + 2
    passes, room = passes_of(ours, longest, captured=True), room_for((1, 2, 1))
    tokens = ours.start()
    ours.append(tokens)
    before = ~ours.side.kv.isnan()
    found = passes.propose(ROWS, room, NUM_DRAFTS)
    assert ((found >= 0).sum(1)).tolist() == [NUM_DRAFTS, 1, 1]
    written = ~ours.side.kv.isnan()[0, 0, 0, :, 0, :, 0] & ~before[0, 0, 0, :, 0, :, 0]
    places = {tuple(place) for place in written.nonzero().tolist() if place[0] != SPARE_BLOCK}
    expected = set()
    for row, length, some in zip(ROWS.tolist(), LENGTHS, (2, 2, 1), strict=True):
        for position in range(length, length + some):
            block = int(ours.table.block_tables[0, row, position // SIZE])
            expected.add((block, position % SIZE))
    assert places == expected
    # Padding attends to as little as it can, whatever lies in the first row.
    padded = passes._lens[len(ROWS) : next(size for size in passes._sizes if size >= len(ROWS))]
    assert len(padded) and (padded == 2 + NUM_DRAFTS).all()


def test_tokens_are_computed_a_second_time_from_lengths_of_their_own() -> None:
    """As a draft model does behind its target, whose lengths have moved on."""
    sides = [Side(SIZE, MAX_ROWS, (None,), kind) for kind in (TritonBackend, TorchBackend)]
    ours, reference = sides
    plan = Decoding(TorchBackend, CASES["greedy"]).prompts
    for side in sides:
        side.run_stage(plan)
        side.table.append_sampled(
            torch.from_numpy(ROWS).to(DEVICE), torch.arange(3, device=DEVICE).int()
        )
    own = ours.table.beside(0)
    graphs = StepGraphs(ours.model, ours.attention, own, MAX_ROWS, 64, has_logits=False)
    ones = np.ones(len(ROWS), np.int32)
    step = StepPlan(1, rows=ROWS, num_new_tokens=ones, num_samples=np.zeros_like(ones))
    key = graphs.find(step)
    assert key is not None
    if ON_GPU:
        graphs.capture([key])
    else:
        graphs._graphs[key] = _Replay(graphs._forward, key)  # type: ignore[assignment]
    own.num_computed.copy_(ours.table.num_computed)
    ours.table.num_computed += 1
    assert graphs.launch(step) == key
    reference.run_stage(step)
    assert torch.equal(own.num_computed[ROWS], reference.table.num_computed[ROWS])
    assert ours.table.num_computed[ROWS].tolist() == [1 + length for length in LENGTHS]
    torch.testing.assert_close(ours.kv, reference.kv, equal_nan=True)
