"""`StepPlan` and `StepResult`: the only things that pass between scheduler and worker.

A plan says what changed since the last one and how many tokens each row computes; it never repeats
what the device rows already hold. Positions, slots and lengths are derived from rows on the device.

The worker carries out the parts of a plan in this order: free rows, clear adapter slots, place
adapters, add rows (forks copy from their parent's row), cut rows back, append known tokens, write
block-table entries, copy blocks, compute, sample.

A row that samples has `num_samples` lines of logits, from its last known token and the drafts that
follow it. Line i is sampled as if the drafts before it were known; the first token is always
accepted, a later one if the draft before it was the token sampled there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.protocol.adapter import PlacedAdapter
from quire.protocol.sampling import SamplingParams

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


MIN_PREFIX_GROUP = 4
"""Fewest rows for which reading shared leading blocks once is worth it."""


def empty_ints() -> Int32Array:
    return np.empty(0, np.int32)


@dataclass(slots=True)
class AddedRow:
    """A request takes a row: everything the device must know about it."""

    row: int
    token_ids: Int32Array
    """All known tokens; those of a fork that its parent's row holds too are not written again."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is already in the row's blocks (cached prefix or fork)."""
    params: SamplingParams
    seed: int
    """64-bit; with the token's position it determines the random numbers drawn."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that `min_tokens` forbids: end-of-sequence ids (unless ignored) and stop ids."""
    fork_of: int = -1
    """Row whose first `num_forked_tokens` token ids are copied on the device; -1 for none."""
    num_forked_tokens: int = 0
    num_logprobs: int = -1
    """Top logprobs wanted per sampled token; -1 means none, 0 the sampled token's alone."""
    num_prompt_logprobs: int = -1
    pooling: str | None = None
    """"last" or "mean": the hidden states of the prompt are wanted as one vector."""
    adapter_slot: int = -1
    """Slot of its adapter; -1: none."""
    appends_sampled: bool = True
    """False where the host sends the token by `append_*`: it chooses it itself (beam search), or
    there are several stages, which must all have it."""


@dataclass(slots=True)
class StepPlan:
    """One numbered step of work."""

    step: int
    cleared_slots: Int32Array = field(default_factory=empty_ints)
    """Adapter slots that hold nothing from now on."""
    placed_adapters: list[PlacedAdapter] = field(default_factory=list)
    freed_rows: Int32Array = field(default_factory=empty_ints)
    drained_rows: Int32Array = field(default_factory=empty_ints)
    """Rows whose blocks others find or get from this step on; they are freed once their tokens in
    flight have arrived."""
    added_rows: list[AddedRow] = field(default_factory=list)
    append_rows: Int32Array = field(default_factory=empty_ints)
    append_tokens: Int32Array = field(default_factory=empty_ints)
    cut_rows: Int32Array = field(default_factory=empty_ints)
    """Rows that are cut back to `cut_lengths` known tokens, without drafts; the last of these is
    then to be computed (again)."""
    cut_lengths: Int32Array = field(default_factory=empty_ints)
    block_rows: Int32Array = field(default_factory=empty_ints)
    """New table entries: table[block_groups[i], block_rows[i], block_indices[i]] = block_ids[i]."""
    block_groups: Int32Array = field(default_factory=empty_ints)
    """The KV group of each."""
    block_indices: Int32Array = field(default_factory=empty_ints)
    block_ids: Int32Array = field(default_factory=empty_ints)
    copy_sources: Int32Array = field(default_factory=empty_ints)
    """Whole blocks copied before this step's KV writes."""
    copy_targets: Int32Array = field(default_factory=empty_ints)
    rows: Int32Array = field(default_factory=empty_ints)
    """Rows that compute in this step."""
    num_new_tokens: Int32Array = field(default_factory=empty_ints)
    """Tokens each of `rows` computes, drafts included, all > 0."""
    num_samples: Int32Array = field(default_factory=empty_ints)
    """Lines of logits of each of `rows`: 0 before its last known token is reached, else 1 and one
    more for each of its drafts that is verified."""
    num_blocks: Int32Array = field(default_factory=empty_ints)
    """Blocks that each of `rows` has in each group, which drafts may be computed in: 0 where a
    draft model has nothing to compute; empty where none asks."""
    prefix_groups: Int32Array = field(default_factory=empty_ints)
    """For each of `rows` the group of rows it shares leading blocks with, -1 for none; empty where
    nothing worth it is shared."""
    prefix_blocks: Int32Array = field(default_factory=empty_ints)
    """Leading blocks that each group shares, all computed before its rows decode."""
    epochs: Int32Array = field(default_factory=empty_ints)
    """Row epochs at planning time: a result applies only while the row's epoch is unchanged."""

    @property
    def num_tokens(self) -> int:
        return int(self.num_new_tokens.sum())

    @property
    def samples(self) -> BoolArray:
        """Which of `rows` sample."""
        return self.num_samples > 0

    @property
    def has_drafts(self) -> bool:
        """Whether drafts are verified."""
        return bool((self.num_samples > 1).any())

    @property
    def first_lines(self) -> Int32Array:
        """Of each row that samples, where its lines begin among those of the step."""
        counts = self.num_samples[self.samples]
        return (np.cumsum(counts) - counts).astype(np.int32)

    @property
    def line_offsets(self) -> Int32Array:
        """Of each line, how many lines of its row are before it, which is as many drafts."""
        counts = self.num_samples[self.samples]
        return (np.arange(counts.sum()) - np.repeat(self.first_lines, counts)).astype(np.int32)

    @property
    def line_tokens(self) -> Int32Array:
        """Of each line, which of the step's new tokens it follows: a row's lines belong to its
        last ones."""
        ends = np.cumsum(self.num_new_tokens)
        if not self.has_drafts:
            return (ends[self.samples] - 1).astype(np.int32)
        first = np.repeat(ends - self.num_samples, self.num_samples)
        return (first + self.line_offsets).astype(np.int32)


@dataclass(eq=False)
class TokenMasks:
    """Tokens that grammars allow in some lines of a step."""

    lines: Int32Array
    bits: Int32Array
    """[lines, words]: token t is bit t % 32 of word t // 32."""


@dataclass(slots=True)
class LogprobArrays:
    """Logprobs of several positions. Column 0 is the token itself, the others are candidates."""

    index: Int32Array
    """Which sampled token (or prompt position) each line belongs to."""
    token_ids: Int32Array
    """[lines, 1 + k]; -1 where a line asked for fewer than k."""
    logprobs: Float32Array
    ranks: Int32Array
    """Rank of column 0 in the whole vocabulary, from 1."""

    def select(self, kept: BoolArray) -> LogprobArrays:
        """Those of the tokens that are kept, counted as these are."""
        lines = kept[self.index]
        number = np.cumsum(kept, dtype=np.int32) - 1
        return LogprobArrays(
            number[self.index[lines]].astype(np.int32),
            self.token_ids[lines],
            self.logprobs[lines],
            self.ranks[lines],
        )


@dataclass(slots=True)
class PromptLogprobs:
    """Logprobs of prompt tokens of one row; `arrays.index` holds prompt positions."""

    row: int
    arrays: LogprobArrays


@dataclass(slots=True)
class PooledRows:
    """Pooled hidden states of prompts that are complete."""

    rows: Int32Array
    vectors: Float32Array
    """[rows, hidden], not normalised."""


@dataclass(slots=True)
class WaitingDrafts:
    """Drafts of rows with a grammar, which says where they are cut."""

    places: Int32Array
    """Which of the rows that sample."""
    token_ids: Int32Array
    """[places, most drafts]; as many count as `StepResult.num_drafts` says."""

    def of(self, places: Int32Array, num_drafts: Int32Array) -> list[list[int]]:
        """The drafts of these places, which are all there."""
        found = self.token_ids[np.searchsorted(self.places, places)]
        counts = num_drafts[places].tolist()
        return [ids[:count] for ids, count in zip(found.tolist(), counts, strict=True)]


@dataclass(slots=True)
class StepResult:
    """What a step produced: of each of `plan.rows[plan.samples]`, in turn, `counts` tokens."""

    step: int
    tokens: Int32Array
    counts: Int32Array
    """Accepted tokens of each row that samples, from 1 to its `num_samples`."""
    logprobs: LogprobArrays | None = None
    """`index` counts `tokens`."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    pooled: PooledRows | None = None
    num_drafts: Int32Array | None = None
    """Drafts that now wait in each row that samples; None: there is no drafter."""
    drafts: WaitingDrafts | None = None
    """Which ones in rows with a grammar; None: there are no such rows, or no drafter."""
    num_repeated: Int32Array | None = None
    """Drafts that the text of each row that samples gives, also where a model drafts instead; None:
    it is one or the other for all."""


class PlanBuilder:
    """Collects the parts of a step while it is scheduled, then builds its plan.

    Running rows come as arrays, admitted ones one by one; arrays are made of them at the end.
    """

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        """Tokens that may still be computed in this step."""
        self.prompt_budget = budget
        """How many of them by rows that compute more than they sample from."""
        self.cleared_slots: Int32Array = empty_ints()
        self.placed_adapters: list[PlacedAdapter] = []
        self.added_rows: list[AddedRow] = []
        self.preempted = False
        self.held_blocks: list[int] = []
        """Sources of copies, referenced until the plan is complete."""
        self._computing: list[Int32Array] = []
        """[rows, tokens, samples]"""
        self._admitted: list[tuple[int, int, int]] = []
        """The same of admitted rows, one by one."""
        self._blocks: list[Int32Array] = []
        """Table entries: [groups, rows, indices, ids]"""
        self._tables: list[tuple[int, int, int, int]] = []
        """Entries of admitted rows that follow each other: group, row, first index, count."""
        self._table_ids: list[int] = []
        self._copies: list[tuple[int, int]] = []

    @property
    def empty(self) -> bool:
        return not self._computing and not self._admitted

    @property
    def room(self) -> int:
        """Tokens that a waiting request may still compute."""
        return min(self.budget, self.prompt_budget)

    def compute(self, rows: Int32Array, counts: Int32Array, samples: Int32Array) -> None:
        self._computing.append(np.array([rows, counts, samples], np.int32))
        self.budget -= int(counts.sum())
        self.prompt_budget -= int(counts[counts > samples].sum())

    def admit(self, added: AddedRow, count: int, samples: bool) -> None:
        """A new row, which computes `count` tokens at once."""
        self.added_rows.append(added)
        self._admitted.append((added.row, count, samples))
        self.budget -= count
        self.prompt_budget -= count

    def write_blocks(
        self, group: int, rows: Int32Array, indices: Int32Array, ids: Int32Array
    ) -> None:
        self._blocks.append(np.array([np.full_like(ids, group), rows, indices, ids], np.int32))

    def write_table(self, group: int, row: int, first: int, ids: list[int]) -> None:
        """Entries of one row from index `first` on."""
        self._tables.append((group, row, first, len(ids)))
        self._table_ids += ids

    def copy_block(self, source: int, target: int) -> None:
        self._copies.append((source, target))

    def build(
        self, freed_rows: list[int], cuts: dict[int, int], appends: list[tuple[int, int]]
    ) -> StepPlan:
        if self._admitted:
            self._gather_admitted()
        copies = np.array(self._copies, np.int32).reshape(-1, 2)
        known = np.array(appends, np.int32).reshape(-1, 2)
        rows, counts, samples = _join(self._computing, 3)
        groups, block_rows, indices, ids = _join(self._blocks, 4)
        return StepPlan(
            step=self.step,
            cleared_slots=self.cleared_slots,
            placed_adapters=self.placed_adapters,
            freed_rows=np.array(freed_rows, np.int32),
            added_rows=self.added_rows,
            append_rows=known[:, 0],
            append_tokens=known[:, 1],
            block_rows=block_rows,
            block_indices=indices,
            block_groups=groups,
            block_ids=ids,
            cut_rows=np.array(list(cuts), np.int32),
            cut_lengths=np.array(list(cuts.values()), np.int32),
            copy_sources=copies[:, 0],
            copy_targets=copies[:, 1],
            rows=rows,
            num_new_tokens=counts,
            num_samples=samples,
        )

    def _gather_admitted(self) -> None:
        self._computing.append(np.array(self._admitted, np.int32).T.copy())
        groups, rows, first, lengths = np.array(self._tables, np.int32).T
        starts = np.cumsum(lengths) - lengths
        indices = np.arange(len(self._table_ids)) + np.repeat(first - starts, lengths)
        ids = np.array(self._table_ids, np.int32)
        entries = [np.repeat(groups, lengths), np.repeat(rows, lengths), indices, ids]
        self._blocks.append(np.array(entries, np.int32))


def _join(parts: list[Int32Array], width: int) -> Int32Array:
    """Arrays of `width` lines side by side. Each line of the result is contiguous."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts, axis=1) if parts else np.empty((width, 0), np.int32)
