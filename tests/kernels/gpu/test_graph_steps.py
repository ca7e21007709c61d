"""Steps as graphs run them equal those that gather their batch and attend in plain torch.

The model is an embedding, a layer of attention for each KV group and a head, in float32. On a GPU
its steps are captured; elsewhere a replay goes through the same forward pass under Triton's
interpreter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from quire.config.latent import LatentConfig  # noqa: E402
from quire.layers.attention import mla  # noqa: E402
from quire.layers.attention import triton as triton_backend  # noqa: E402
from quire.layers.attention.backend import GroupedAttention  # noqa: E402
from quire.layers.attention.layer import QKV, LatentQKV, Rotation, StepContext  # noqa: E402
from quire.layers.attention.mla import LatentBackend  # noqa: E402
from quire.layers.attention.shared_prefix import HostPrefixTiles, prefix_tiles  # noqa: E402
from quire.layers.attention.torch import TorchBackend  # noqa: E402
from quire.layers.attention.triton import TritonBackend  # noqa: E402
from quire.layers.linear import LatentLinear  # noqa: E402
from quire.layers.parallel import ONE_STAGE, Stage  # noqa: E402
from quire.protocol.plan import AddedRow, StepPlan  # noqa: E402
from quire.protocol.sampling import SamplingParams  # noqa: E402
from quire.worker.batch import gather_batch  # noqa: E402
from quire.worker.graphs import DecodeKey, MixedKey, StepGraphs, mixed_keys  # noqa: E402
from quire.worker.rows import RowTable  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NUM_HEADS, KV_HEADS, DIM, VOCAB, MAX_LEN = 4, 2, 32, 50, 128
SPLIT = [NUM_HEADS, KV_HEADS, KV_HEADS]
WINDOW = 21

pytestmark = pytest.mark.skipif(
    not ON_GPU and not triton.knobs.runtime.interpret,
    reason="needs a GPU, or TRITON_INTERPRET=1 (see tests/kernels/test_triton_interpreter.py)",
)


Windows = tuple[int | None, ...]
"""Of each KV group."""


class LayerPerGroup:
    """A model as a worker calls it."""

    def __init__(self, windows: Windows) -> None:
        generator = torch.Generator().manual_seed(1)

        def weights(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE)

        width = (NUM_HEADS + 2 * KV_HEADS) * DIM
        self.windows = windows
        self.tokens, self.positions = weights(VOCAB, width), weights(MAX_LEN, width)
        self.head = weights(NUM_HEADS * DIM, VOCAB) / DIM

    def __call__(self, step: StepContext) -> Tensor:
        if step.hidden is not None:
            given = step.hidden.repeat(1, 2)
        else:
            assert step.token_ids is not None
            given = self.tokens[step.token_ids]
        joined = given + self.positions[step.positions]
        qkv = QKV(*joined.view(-1, joined.shape[1] // DIM, DIM).split(SPLIT, 1))
        attended = [
            attention.attend(0, qkv, DIM**-0.5, window).flatten(1)
            for attention, window in zip(step.attention, self.windows, strict=True)
        ]
        return sum(attended[1:], attended[0])

    def new_hidden(self, count: int) -> Tensor:
        return torch.full((count, NUM_HEADS * DIM), float("nan"), device=DEVICE)

    def new_logits(self, count: int) -> Tensor:
        return torch.empty(count, VOCAB, device=DEVICE)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(hidden, self.head, out=out)


class AdaptedLayer(LayerPerGroup):
    """A layer to whose outputs, and lines of logits, slots of adapters add what is their own."""

    def __init__(self) -> None:
        super().__init__((None,))
        generator = torch.Generator().manual_seed(4)
        self.outputs = torch.randn(9, NUM_HEADS * DIM, generator=generator).to(DEVICE)
        self.lines = torch.randn(9, VOCAB, generator=generator).to(DEVICE)
        self.outputs[-1] = self.lines[-1] = 0  # of tokens without an adapter
        self.slots: tuple[Tensor | None, Tensor | None] = (None, None)

    def begin_step(self, slots: Tensor | None, line_slots: Tensor | None = None) -> None:
        self.slots = slots, line_slots

    def __call__(self, step: StepContext) -> Tensor:
        hidden = super().__call__(step)
        return hidden if self.slots[0] is None else hidden + self.outputs[self.slots[0]]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        found = super().logits(hidden, out)
        return found if self.slots[1] is None else found.add_(self.lines[self.slots[1]])


LATENT = LatentConfig(q_rank=None, kv_rank=36, nope_dim=20, rope_dim=12, value_dim=DIM)


class LatentLayer(LayerPerGroup):
    """A layer of latent attention."""

    def __init__(self) -> None:
        super().__init__((None,))
        generator = torch.Generator().manual_seed(2)
        self.num_heads = NUM_HEADS
        rows, width = LATENT.nope_dim + DIM, NUM_HEADS * LATENT.query_dim + LATENT.cached_dim

        def weights(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE)

        self.tokens, self.positions = weights(VOCAB, width), weights(MAX_LEN, width)
        self.dense_weight = weights(NUM_HEADS * rows, LATENT.kv_rank) / 6
        by_head = self.dense_weight.view(NUM_HEADS, rows, -1)
        self.halves = by_head.split_with_sizes((LATENT.nope_dim, DIM), dim=1)
        angles = weights(MAX_LEN, LATENT.rope_dim // 2)
        self.angles = angles.cos(), angles.sin()

    native = None
    to_latent, from_latent = LatentLinear.to_latent, LatentLinear.from_latent

    def __call__(self, step: StepContext) -> Tensor:
        assert step.token_ids is not None
        joined = self.tokens[step.token_ids] + self.positions[step.positions]
        q, compressed = joined.split([joined.shape[1] - LATENT.cached_dim, LATENT.cached_dim], 1)
        expansion: Any = self
        latent = LatentQKV(
            q.view(len(q), NUM_HEADS, LATENT.query_dim),
            compressed,
            self.angles[0].new_ones(LATENT.kv_rank),
            1e-6,
            Rotation(*self.angles, step.positions, True),
            expansion,
        )
        return step.attention[0].attend(0, latent, 0.2, None).flatten(1)


class Side:
    """Rows, a cache and a model: the same on both sides of a comparison."""

    def __init__(self, size: int, max_rows: int, windows: Windows, backend: Any) -> None:
        blocks, groups = MAX_LEN // size, len(windows)
        self.table = RowTable(max_rows, MAX_LEN, blocks, size, DEVICE, groups)
        # Nothing is read that was not written; the first block is for rows that have none.
        shape = (groups, 1, 2, 1 + max_rows * blocks, KV_HEADS, size, DIM)
        self.kv = torch.full(shape, float("nan"), device=DEVICE)
        self.attention = GroupedAttention(
            [backend(kv, NUM_HEADS, KV_HEADS, DIM, size) for kv in self.kv]
        )
        self.model: Any = LayerPerGroup(windows)
        for group, table in enumerate(self.table.block_tables):
            generator = torch.Generator().manual_seed(group)
            order = 1 + torch.randperm(max_rows * blocks, generator=generator)
            table.copy_(order.view(max_rows, blocks))

    def run_eagerly(self, plan: StepPlan) -> Tensor:
        hidden, sampled = self.run_stage(plan)
        return self.model.logits(hidden[sampled])

    def run_stage(self, plan: StepPlan, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states, and which of them are sampled from."""
        staged = self.table.update(plan)
        batch = gather_batch(self.table, plan, staged, None, bool(self.table.used_adapters(plan)))
        attention = self.attention.plan(batch.attention)
        if isinstance(self.model, AdaptedLayer):
            slots = batch.adapter_slots
            self.model.begin_step(slots, None if slots is None else slots[batch.sample_indices])
        step = StepContext(batch.positions, attention, batch.token_ids, hidden=given)
        return self.model(step), batch.sample_indices


class LatentSide(Side):
    def __init__(self, size: int, max_rows: int, backend: Any) -> None:
        super().__init__(size, max_rows, (None,), TorchBackend)
        shape = (1, 1, self.kv.shape[3], 1, size, LATENT.cached_dim)
        self.kv = torch.full(shape, float("nan"), device=DEVICE)
        attention = backend(self.kv, NUM_HEADS, 1, LATENT.cached_dim, size, None, LATENT)
        self.attention, self.model = GroupedAttention([attention]), LatentLayer()


class _Replay:
    """In place of a captured graph where there is no GPU."""

    def __init__(self, graphs: StepGraphs, key: Any) -> None:
        self._graphs, self._key = graphs, key

    def replay(self) -> None:
        self._graphs._forward(self._key)


class Graphs:
    """`StepGraphs` over a side; a shape is captured when a step first needs it."""

    def __init__(
        self,
        side: Side,
        max_queries: int = 1,
        shares_prefixes: bool = False,
        stage: Stage = ONE_STAGE,
    ) -> None:
        self.side = side
        adapters = side.model if isinstance(side.model, AdaptedLayer) else None
        others = shares_prefixes, max_queries, stage, None, adapters
        self.graphs = graphs_of(side, 1024, *others)

    def run(self, plan: StepPlan, prefixes: HostPrefixTiles | None = None) -> tuple[Any, Tensor]:
        staged = self.side.table.update(plan)
        uses_adapters = bool(self.side.table.used_adapters(plan))
        key = self.graphs.find(plan, prefixes, uses_adapters)
        assert key is not None
        if key not in self.graphs._graphs:
            if ON_GPU:
                self.graphs.capture([key])
            else:
                self.graphs._graphs[key] = _Replay(self.graphs, key)  # type: ignore[assignment]
        logits = self.graphs.replay(plan, staged, prefixes, uses_adapters)
        assert logits is not None
        return key, logits.clone()


def graphs_of(side: Side, max_tokens: int, *others: Any) -> StepGraphs:
    parts = side.model, side.attention, side.table
    return StepGraphs(*parts, len(side.table.num_tokens), max_tokens, *others)


def first_plan(lengths: list[int], max_rows: int, seed: int) -> StepPlan:
    """Rows in any order with so many tokens, all to be computed; the last does not sample."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(max_rows)[: len(lengths)].astype(np.int32)
    added = [
        AddedRow(row, rng.integers(0, VOCAB, n).astype(np.int32), n, 0, SamplingParams(), 0)
        for row, n in zip(rows.tolist(), lengths, strict=True)
    ]
    samples = np.ones(len(rows), np.int32)
    samples[-1] = 0
    counts = np.array(lengths, np.int32)
    return StepPlan(0, added_rows=added, rows=rows, num_new_tokens=counts, num_samples=samples)


def drafted_plan(sides: list[Side], rows: np.ndarray, counts: list[int]) -> StepPlan:
    """Rows of one known token that is to be computed, and drafts behind it."""
    rng = np.random.default_rng(len(rows))
    tokens = torch.from_numpy(rng.integers(0, VOCAB, (len(rows), 8)).astype(np.int32)).to(DEVICE)
    for side in sides:
        for place, row in enumerate(rows.tolist()):
            at = int(side.table.num_computed[row])
            side.table.token_ids[row, at : at + 8] = tokens[place]
    new = np.array(counts, np.int32)
    return StepPlan(1, rows=rows, num_new_tokens=new, num_samples=new.copy())


def with_prompt(plan: StepPlan, row: int, length: int) -> StepPlan:
    """The plan with another row, whose prompt is computed in the same step."""
    tokens = np.arange(length, dtype=np.int32) % VOCAB
    plan.added_rows = [AddedRow(row, tokens, length, 0, SamplingParams(), 0)]
    plan.rows = np.append(plan.rows, np.int32(row))
    plan.num_new_tokens = np.append(plan.num_new_tokens, np.int32(length))
    plan.num_samples = np.append(plan.num_samples, np.int32(1))
    return plan


def check(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


CASES = [
    # tokens of each row, of a prompt beside them (0: none), most queries, block size, windows
    ([2, 2, 2], 0, 2, 16, (None, 9)),
    ([4, 3, 1, 4, 2], 0, 8, 32, (WINDOW,)),
    ([8, 5], 40, 8, 16, (None,)),
    ([1, 3, 4, 1], 9, 4, 16, (WINDOW, None)),
    *([([1 + i % 8 for i in range(40)], 60, 8, 16, (None, 30))] * ON_GPU),
    *([([4] * 70, 0, 4, 16, (5,))] * ON_GPU),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case)[-60:])
def test_steps_with_drafts(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines come in the order of the plan, whatever pads the graph, and rows count as
    computed; keys and values go where they belong and nowhere else."""
    counts, prompt, max_queries, size, windows = case
    if not ON_GPU:  # each program takes the interpreter a while
        monkeypatch.setattr(triton_backend, "PROGRAMS_WANTED", 16)
        monkeypatch.setattr(triton_backend, "MIN_SPLITS", 2)
    max_rows = len(counts) + 3
    sides = [Side(size, max_rows, windows, kind) for kind in (TritonBackend, TorchBackend)]
    ours, reference = sides
    graphs = Graphs(ours, max_queries)
    plan = first_plan([3 + 7 * i % 50 for i in range(len(counts))], max_rows, seed=3)
    for side in sides:
        side.run_eagerly(plan)
    for step in range(2):  # the second replays what the first captured
        drafted = drafted_plan(sides, plan.rows, counts)
        free = next(row for row in range(max_rows) if row not in plan.rows)
        if prompt:
            drafted = with_prompt(drafted, free, prompt)
        drafted.num_samples[step] = 1  # one line of several tokens
        key, found = graphs.run(drafted)
        assert key.queries >= max(counts)
        assert key.num_prompts or not prompt
        check(found, reference.run_eagerly(drafted))
        assert torch.equal(ours.table.num_computed, reference.table.num_computed)
        written = ~reference.kv.isnan()
        assert torch.equal(~ours.kv.isnan(), written)
    torch.testing.assert_close(ours.kv[written], reference.kv[written])


@pytest.mark.parametrize(("windows", "shares"), [((None, WINDOW), False), ((None,), True)], ids=str)
def test_steps_of_single_tokens(
    windows: Windows, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that decode, some of which sample; they share their first block, which is read once
    where the graph is for that."""
    if not ON_GPU:  # each program takes the interpreter a while
        monkeypatch.setattr(triton_backend, "PROGRAMS_WANTED", 16)
        monkeypatch.setattr(triton_backend, "MIN_SPLITS", 2)
    sides = [Side(16, 7, windows, kind) for kind in (TritonBackend, TorchBackend)]
    ours, reference = sides
    graphs = Graphs(ours, shares_prefixes=shares)
    plan = first_plan([17, 30, 18, 24], 7, seed=5)
    for added in plan.added_rows:
        added.token_ids[:16] = plan.added_rows[0].token_ids[:16]
    for side in sides:
        side.table.block_tables[:, :, 0] = side.table.block_tables[:, :1, 0].clone()
        side.run_eagerly(plan)
    tiles = None
    if shares:
        groups, lens = np.zeros(4, np.int32), np.array([16], np.int32)
        tiles = prefix_tiles(groups, lens, ours.attention.prefix_members)
    for step in range(2):  # the second replays what the first captured
        single = drafted_plan(sides, plan.rows, [1] * 4)
        single.num_samples[step] = 0
        key, found = graphs.run(single, tiles)
        assert key == DecodeKey(7 if shares else 4, shares)
        check(found, reference.run_eagerly(single))
        assert torch.equal(ours.table.num_computed, reference.table.num_computed)
        assert torch.equal(ours.kv.isnan(), reference.kv.isnan())


@pytest.mark.parametrize("slots", [(2, -1, 0, 7), (-1, -1, -1, -1)], ids=str)
def test_steps_with_adapters(slots: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token has its row's adapter, and lines have those of their tokens; steps without any
    take the graphs without."""
    if not ON_GPU:  # each program takes the interpreter a while
        monkeypatch.setattr(triton_backend, "PROGRAMS_WANTED", 16)
        monkeypatch.setattr(triton_backend, "MIN_SPLITS", 2)
    sides = [Side(16, 7, (None,), kind) for kind in (TritonBackend, TorchBackend)]
    for side in sides:
        side.model = AdaptedLayer()
    ours, reference = sides
    graphs = Graphs(ours, max_queries=4)
    plan = first_plan([9, 14, 8, 11], 7, seed=5)
    for added, slot in zip(plan.added_rows, slots, strict=True):
        added.adapter_slot = slot
    for side in sides:
        side.run_eagerly(plan)
    free = next(row for row in range(7) if row not in plan.rows)
    single, several = (drafted_plan(sides, plan.rows, counts) for counts in ([1] * 4, [2, 1, 4, 3]))
    for step in single, with_prompt(several, free, 9):
        key, found = graphs.run(step)
        assert key.uses_adapters == (max(slots) >= 0)
        check(found, reference.run_eagerly(step))


def test_steps_of_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single tokens, drafts beside a prompt that graphs attend with as it is and other steps expand
    latents for."""
    if not ON_GPU:
        monkeypatch.setattr(mla, "PROGRAMS_WANTED", 8)
    sides = [LatentSide(16, 7, kind) for kind in (LatentBackend, TorchBackend)]
    ours, reference = sides
    graphs = Graphs(ours, 4)
    plan = first_plan([17, 50, 3, 24], 7, seed=5)
    check(*(side.run_eagerly(plan) for side in sides))
    free = next(row for row in range(7) if row not in plan.rows)
    drafted = with_prompt(drafted_plan(sides, plan.rows, [2, 4, 1, 3]), free, 60)
    single = drafted_plan(sides, plan.rows, [1] * 4)
    for step, (key_type, part) in enumerate(((DecodeKey, single), (MixedKey, drafted))):
        key, found = graphs.run(part)
        assert type(key) is key_type, step
        check(found, reference.run_eagerly(part))
        assert torch.equal(ours.table.num_computed, reference.table.num_computed)
        written = ~reference.kv.isnan()
        assert torch.equal(~ours.kv.isnan(), written)
    torch.testing.assert_close(ours.kv[written], reference.kv[written])
    assert (ours.table.max_computed >= ours.table.num_computed.cpu().numpy()).all()


class Pipe:
    """A link to the same process."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def send(self, x: Tensor) -> None:
        self.sent.append(x.clone())

    def receive(self, out: Tensor) -> Tensor:
        return out.copy_(self.sent.pop(0))


def test_stages_pass_on_what_their_graphs_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt beside rows that decode, then fewer and fewer of them: hidden states go from graph
    to graph without those of padding or of earlier steps, and only the last stage has logits."""
    if not ON_GPU:
        monkeypatch.setattr(triton_backend, "PROGRAMS_WANTED", 16)
    link, kinds = Pipe(), (TritonBackend, TorchBackend)
    stages = [[Side(16, 6, (None,), kind) for kind in kinds] for _ in range(2)]
    graphs = [Graphs(ours, stage=Stage(index, 2, link)) for index, (ours, _) in enumerate(stages)]
    assert graphs[0].graphs._logits is None

    def expected(plan: StepPlan) -> Tensor:
        hidden, _ = stages[0][1].run_stage(plan)
        hidden, sampled = stages[1][1].run_stage(plan, hidden)
        return stages[1][1].model.logits(hidden[sampled])

    plan = first_plan([6, 3, 9], 6, seed=7)
    _, sent = graphs[0].run(plan)
    assert sent.shape == (18, NUM_HEADS * DIM)
    check(graphs[1].run(plan)[1], expected(plan))
    sides = [side for stage in stages for side in stage]
    for count in (3, 1):
        single = drafted_plan(sides, plan.rows[:count], [1] * count)
        assert len(graphs[0].run(single)[1]) == count
        check(graphs[1].run(single)[1], expected(single))
        assert not link.sent


def test_eager_steps_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no graph fits, rows with drafts take the same kernel, and others tiles."""
    if not ON_GPU:
        monkeypatch.setattr(triton_backend, "PROGRAMS_WANTED", 16)
    sides = [Side(16, 8, (WINDOW,), kind) for kind in (TritonBackend, TorchBackend)]
    plan = first_plan([30, 5, 18, 40], 8, seed=4)
    check(*(side.run_eagerly(plan) for side in sides))
    drafted = drafted_plan(sides, plan.rows, [3, 1, 4, 2])
    free = next(row for row in range(8) if row not in plan.rows)
    drafted = with_prompt(drafted, free, 11)
    used: list[int] = []
    kernel = TritonBackend.workspace
    monkeypatch.setattr(
        TritonBackend, "workspace", lambda self, n: (used.append(n), kernel(self, n))[1]
    )
    check(*(side.run_eagerly(drafted) for side in sides))
    assert used == [4], "the smallest kernel that has room for all drafts"


def test_shapes_without_speculation() -> None:
    """Two graphs for each number of tokens: rows with a few are prompts or, where there are many,
    for decode attention."""
    assert mixed_keys(300, 4096, 1, 8) == [
        MixedKey(size, min(256, size // 2), queries, 16)
        for queries in (1, 8)
        for size in (64, 128, 192, 256, 384, 512, 640, 768, 1024)
    ]
    assert mixed_keys(5, 65, 1, 1) == [MixedKey(size, 5, 1, 16) for size in (64, 128)]


def test_which_graph_a_step_takes() -> None:
    """Only rows with more tokens than decode attention takes count as prompts, and steps without
    drafts take the same graphs whether or not speculation is configured."""
    side = Side(16, 300, (None,), TritonBackend)
    plain, five, drafting = (graphs_of(side, 4096, False, queries) for queries in (1, 5, 8))

    def plan(counts: list[int], samples: list[int] | None = None) -> StepPlan:
        lines = np.array(samples or [1] * len(counts), np.int32)
        rows = np.arange(len(counts), dtype=np.int32)
        return StepPlan(0, rows=rows, num_new_tokens=np.array(counts, np.int32), num_samples=lines)

    for counts in ([1] * 30 + [90], [20] * 16, [64], [1, 2], [200] * 5):
        key = plain.find(plan(counts))
        assert isinstance(key, MixedKey) and key.queries == 1
        assert five.find(plan(counts)) == drafting.find(plan(counts)) == key
    few = plain.find(plan([4] * 17))
    assert isinstance(few, MixedKey) and few.queries == 8
    assert drafting.find(plan([4] * 17, [4] * 17)) == MixedKey(96, 24, 4, 0)
    assert drafting.find(plan([3] * 60, [3] * 60)) == MixedKey(192, 96, 8, 16), "the fewest tokens"
    assert five.find(plan([5] * 60, [5] * 60)) == MixedKey(320, 64, 8, 0)
    assert five.find(plan([4] * 60, [4] * 60)) == MixedKey(256, 64, 4, 0)
    assert drafting.find(plan([8] * 256, [8] * 256)) == MixedKey(2048, 256, 8, 0)
    assert drafting.find(plan([2] * 100, [2] * 100)) == MixedKey(256, 128, 2, 0)
    assert drafting.find(plan([4] * 40 + [90], [4] * 40 + [1])) == MixedKey(256, 128, 8, 16)
    assert drafting.find(plan([4] * 17)) is not None, "tokens that a grammar forces, say"
    assert drafting.find(plan([4] * 8 + [9] * 17, [4] * 8 + [0] * 17)) is None
    assert drafting.find(plan([8] * 257, [8] * 257)) is None
