"""`Sequence` and `Columns`: a sequence on the host; while it has a row its numbers are there.

Beside them `SchedulerLimits`, which say how many rows there are and how long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.config.speculative import SpeculativeConfig
from quire.protocol.adapter import AdapterContent, AdapterLimits
from quire.protocol.errors import RequestError
from quire.protocol.kv_spec import held_blocks
from quire.protocol.output import (
    BlockState,
    FinishedSequence,
    SequencePromptLogprobs,
    SequenceSnapshot,
    StepOutput,
)
from quire.protocol.plan import (
    AddedRow,
    BoolArray,
    Int32Array,
    Int64Array,
    StepPlan,
    StepResult,
    empty_ints,
)
from quire.protocol.request import MediaSpan, NewRequest, SchedulingPolicy
from quire.protocol.sampling import SamplingParams

Count = TypeVar("Count", int, Int32Array)


@dataclass(frozen=True)
class SchedulerLimits:
    """All of it is known once the KV cache has its size."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    windows: tuple[int | None, ...] = (None,)
    """Of each KV group, how many tokens a query sees; None: all."""
    policy: str = SchedulingPolicy.FCFS
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt per step; 0 leaves it to the budget."""
    target_itl_s: float | None = None
    """Gap between two tokens that prompts may stretch those of running streams to; None: chosen
    from step times, 0: any."""
    graph_tokens: int = 0
    """Most tokens of a step with prompts that runs as one CUDA graph; 0 without graphs."""
    reserves_max_length: bool = False
    """Reserve `max_model_len` tokens on admission, as engines without paging do (benchmarks)."""
    max_num_queued_reqs: int = 0
    """Most requests that wait and have never run; 0 for no limit."""
    max_num_queued_tokens: int = 0
    """Most prompt tokens of these; 0 for no limit."""
    groups_prefixes: bool = False
    """Tell the workers which running requests share leading blocks."""
    speculation: SpeculativeConfig | None = None
    num_stages: int = 1
    """Stages of a pipeline. Of several, all learn of sampled tokens through plans alone."""
    adapters: AdapterLimits | None = None
    """None: requests have none."""
    seed: int = 0
    cache_identity: tuple[str, ...] = ()
    """Model, dtype and layout: what the KV of equal tokens depends on."""

    @property
    def num_ahead(self) -> int:
        """Tokens that a row should have blocks for beyond those it computes."""
        return 0 if self.speculation is None else self.speculation.num_ahead

    @property
    def max_blocks_per_row(self) -> int:
        return self.blocks_for(self.max_model_len)

    def blocks_for(self, num_tokens: Count) -> Count:
        return -(-num_tokens // self.block_size)

    def max_held_blocks(self, group: int) -> int:
        """Most blocks of a sequence in a group."""
        window = self.windows[group]
        if window is None:
            return self.max_blocks_per_row
        return held_blocks(window, self.block_size, self.max_num_batched_tokens)

    def blocks_held(self, num_tokens: int) -> int:
        """Most blocks of a sequence of so many tokens, in all groups."""
        blocks = self.blocks_for(num_tokens)
        return sum(min(blocks, self.max_held_blocks(i)) for i in range(len(self.windows)))

    def max_total(self, new: NewRequest) -> int:
        """Prompt and output tokens at which a request ends by length."""
        if new.params.max_tokens is None:
            return self.max_model_len
        return min(len(new.prompt_token_ids) + new.params.max_tokens, self.max_model_len)

    def check_fits(self, new: NewRequest) -> None:
        """Refuse a request that the cache or the rows could not hold even alone."""
        num_prompt, total = len(new.prompt_token_ids), self.max_total(new)
        need = self.blocks_held(total) * max(new.beam_width, 1)
        if need > self.num_blocks:
            raise RequestError(
                f"request {new.request_id!r} can never fit: {num_prompt} prompt tokens and up to "
                f"{total - num_prompt} generated ones need {need} KV blocks of {self.block_size} "
                f"tokens, but the cache has {self.num_blocks}. Lower max_tokens or beam_width, or "
                "give the cache more memory (kv_cache_memory_bytes, gpu_memory_utilization)."
            )
        if new.beam_width > self.max_num_seqs:
            raise RequestError(
                f"beam_width={new.beam_width} exceeds max_num_seqs={self.max_num_seqs}: all beams "
                "run at once. Lower beam_width or raise max_num_seqs."
            )


CANDIDATES_PER_BEAM = 2
"""Most likely tokens of each beam that are looked at, times the number of beams."""


class Status(IntEnum):
    WAITING = 0
    RUNNING = 1
    DRAINING = 2
    """Preempted or aborted, keeping its row until the tokens in flight are applied."""
    FINISHED = 3


class Columns:
    """The numbers of all running sequences, one row each.

    `num_tokens` and `num_computed` are upper bounds that include steps in flight; `num_known`
    counts the tokens whose ids the host has. With several stages `num_tokens` is `num_known`: a row
    that has computed all of them waits for the token that it samples.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        num_groups, max_rows = len(limits.windows), limits.max_num_seqs
        self.has_windows = limits.windows != (None,) * num_groups
        self.block_size = limits.block_size
        self.has_stages = limits.num_stages > 1

        def ints() -> Int32Array:
            return np.zeros(max_rows, np.int32)

        def flags() -> BoolArray:
            return np.zeros(max_rows, np.bool_)

        self.token_ids: Int32Array = np.zeros((max_rows, limits.max_model_len), np.int32)
        self.block_tables: Int32Array = np.zeros(
            (num_groups, max_rows, limits.max_blocks_per_row), np.int32
        )
        self.epoch = ints()
        """Bumped when a row changes hands, so that late results are dropped."""
        self.running = flags()
        self.num_prompt = ints()
        self.num_known = ints()
        self.num_tokens = ints()
        self.num_sent = ints()
        """Known tokens that plans have told the devices of; kept with several stages."""
        self.num_computed = ints()
        self.computed_before = ints()
        """`num_computed` before the step `last_step` was planned."""
        self.last_step = np.full(max_rows, -1, np.int64)
        self.first_step = np.full(max_rows, -1, np.int64)
        """The step whose plan gave the row to its sequence."""
        self.max_total = ints()
        """Prompt and output tokens at which the sequence ends by length."""
        self.min_total = ints()
        """No stop token ends the sequence before it has this many tokens."""
        self.num_certain = ints()
        """Computed tokens less those in flight that may be rejected; kept where a group has a
        window."""
        self.num_blocks = ints()
        """Length of a row's tables, the same in all groups."""
        self.first_blocks: Int32Array = np.zeros((num_groups, max_rows), np.int32)
        """Of each group, the first block that the row still holds."""
        self.num_held_blocks = ints()
        """Blocks full of tokens that the sequence came with, and how many of them are published."""
        self.num_published = ints()
        self.has_sampled = flags()
        """A step is planned in which the row samples, after which drafts wait in it."""
        self.num_waiting_drafts = ints()
        """Drafts that wait in the row after the last step that has reported."""
        self.speculates = flags()
        """The request lets tokens be drafted."""
        self.in_flight = ints()
        """Planned steps that include the row and are not applied yet."""
        self.synchronous = flags()
        """The host must have all tokens before the row goes on."""
        self.constrained = flags()
        """A grammar says which tokens may be sampled; it needs the one before."""
        self.host_chooses = flags()
        """The host decides on the next token (beam search), not the sampler."""
        self.has_followers = flags()
        self.streams = flags()
        self.interactive = flags()
        self.tenant = ints()
        self.keys: Int64Array = np.zeros(max_rows, np.int64)
        self.last_token_time = np.zeros(max_rows, np.float64)
        self.rank: Int64Array = np.zeros((2, max_rows), np.int64)
        self.stop_ids: Int32Array = np.full((max_rows, 4), -1, np.int32)

    def fill(
        self, sequence: Sequence, step: int, num_cached: int, num_new: int, tenant: int
    ) -> int:
        """Write a sequence that `step` admits to its row, where it computes `num_new` tokens after
        those whose KV is there already; its blocks come after. Returns how many tokens it will have
        after the step."""
        row, known, by_host = sequence.row, sequence.held_token_ids, sequence.is_beam
        num_known = len(known)
        samples = num_cached + num_new == num_known
        num_tokens = num_known + (samples and not by_host)
        self.epoch[row] += 1
        self.running[row] = True
        self.token_ids[row, :num_known] = known
        self.num_prompt[row] = sequence.num_prompt
        self.num_known[row] = num_known
        self.num_tokens[row] = num_tokens
        if self.has_stages:
            self.num_tokens[row] = self.num_sent[row] = num_known
        self.num_computed[row] = self.num_certain[row] = num_cached + num_new
        self.computed_before[row] = num_cached
        self.last_step[row] = self.first_step[row] = step
        self.max_total[row] = sequence.max_total
        self.min_total[row] = sequence.num_prompt + sequence.params.min_tokens
        self.num_held_blocks[row] = num_known // self.block_size
        self.has_sampled[row] = samples
        self.speculates[row] = sequence.params.speculation
        self.in_flight[row] = 1
        self.constrained[row] = sequence.params.structured_outputs is not None
        self.synchronous[row] = by_host
        self.host_chooses[row] = by_host
        self.has_followers[row] = bool(sequence.followers)
        self.streams[row] = sequence.new.streams and not by_host
        self.interactive[row] = sequence.new.interactive
        self.keys[row] = sequence.key
        self.tenant[row] = tenant
        if sequence.last_token_time:
            self.last_token_time[row] = sequence.last_token_time
        self.rank[:, row] = sequence.rank
        self._set_stop_ids(row, sequence.stop_ids)
        return num_tokens

    @property
    def held_blocks(self) -> Int32Array:
        """Blocks that each row holds, in all groups."""
        if len(self.first_blocks) == 1 and not self.has_windows:
            return self.num_blocks
        held: Int32Array = len(self.first_blocks) * self.num_blocks - self.first_blocks.sum(axis=0)
        return held

    @property
    def held_tokens(self) -> Int32Array:
        """Slots of those blocks that have a token."""
        if len(self.first_blocks) == 1 and not self.has_windows:
            return self.num_computed
        let_go = self.block_size * self.first_blocks.sum(axis=0)
        held: Int32Array = len(self.first_blocks) * self.num_computed - let_go
        return held

    def awaits_tokens(self, rows: Int32Array, num_steps_in_flight: int) -> BoolArray:
        """Which rows the host must have tokens of before they go on. Masks of grammars are made so
        late that they can await the tokens of one step."""
        awaits: BoolArray = self.synchronous[rows]
        if num_steps_in_flight > 1:
            awaits = awaits | self.constrained[rows]
        return awaits & (self.in_flight[rows] > 0)

    def take_unsent(self, rows: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Known tokens that the devices do not have yet, row after row, and the row of each. From
        now on they count as sent."""
        sent = self.num_sent[rows]
        counts = self.num_known[rows] - sent
        self.num_sent[rows] += counts
        rows_of = np.repeat(rows, counts)
        places = np.repeat(sent - (np.cumsum(counts) - counts), counts) + np.arange(len(rows_of))
        return rows_of, self.token_ids[rows_of, places]

    def _set_stop_ids(self, row: int, ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            more = np.full((len(self.stop_ids), len(ids) - width), -1, np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, more], axis=1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(ids)] = ids

    # --- taking results in ----------------------------------------------------------------------

    def accept(
        self, plan: StepPlan, result: StepResult, live: BoolArray, complete: BoolArray | None
    ) -> AcceptedTokens:
        """Which tokens of a result rows take in. `live` says of each of `plan.rows` whether its
        sequence still holds it, `complete` of each token whether nothing can follow it."""
        samples, counts = plan.samples, result.counts
        rows = plan.rows[samples]
        keep = live[samples] & ~self.host_chooses[rows]
        if len(result.tokens) == len(rows):  # a token each, as in most steps
            places, tokens = np.arange(len(rows), dtype=np.int32), result.tokens
            if not keep.all():
                places = places[keep]
                rows, tokens = rows[places], tokens[places]
            num_known = self.num_known[rows] + 1
            stops, ends = self._ends(rows, tokens, num_known)
            if complete is not None:
                stops |= complete[places]
                ends |= stops
            return AcceptedTokens(rows, np.ones_like(rows), tokens, places, ends, stops)
        index = np.repeat(np.arange(len(rows)), counts)
        offset = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
        num_known = (self.num_known[rows[index]] + offset + 1).astype(np.int32)
        stops, ends = self._ends(rows[index], result.tokens, num_known)
        if complete is not None:
            stops |= complete
            ends |= stops
        num_tokens = counts.copy()
        np.minimum.at(num_tokens, index[ends], offset[ends] + 1)
        taken = keep[index] & (offset < num_tokens[index])
        is_last = taken & (offset == num_tokens[index] - 1)
        return AcceptedTokens(
            rows=rows[keep],
            counts=num_tokens[keep].astype(np.int32),
            tokens=result.tokens[taken],
            places=np.flatnonzero(taken).astype(np.int32),
            ends=ends[is_last],
            stops=stops[is_last],
        )

    def _ends(
        self, rows: Int32Array, tokens: Int32Array, num_known: Int32Array
    ) -> tuple[BoolArray, BoolArray]:
        """Which tokens are stop tokens, where a row has enough for one; and which end a sequence,
        by that or by its length."""
        stops: BoolArray = (self.stop_ids[rows] == tokens[:, None]).any(axis=1)
        stops &= num_known >= self.min_total[rows]
        return stops, stops | (num_known >= self.max_total[rows])

    def output(
        self, plan: StepPlan, result: StepResult, live: BoolArray, accepted: AcceptedTokens
    ) -> StepOutput:
        """New tokens and logprobs of streaming rows whose sequence still holds the row (`live`)."""
        rows = accepted.rows
        if len(accepted.tokens) != len(rows):
            rows = np.repeat(rows, accepted.counts)
        streams = self.streams[rows]
        output = StepOutput(keys=self.keys[rows[streams]], tokens=accepted.tokens[streams])
        if result.logprobs is not None:
            shown = np.zeros(len(result.tokens), np.bool_)
            shown[accepted.places[streams]] = True
            output.logprobs = result.logprobs.select(shown)
        for part in result.prompt_logprobs:
            if live[plan.rows == part.row].any():
                key = int(self.keys[part.row])
                output.prompt_logprobs.append(SequencePromptLogprobs(key, part.arrays))
        return output


@dataclass(slots=True)
class AcceptedTokens:
    """Sampled tokens that rows take in: those of sequences that still hold their row and whose
    tokens the sampler draws, up to the first token that ends the sequence."""

    rows: Int32Array
    counts: Int32Array
    """Tokens of each row, at least 1."""
    tokens: Int32Array
    """Row after row."""
    places: Int32Array
    """Where each lies in `StepResult.tokens`."""
    ends: BoolArray
    """Of each row, whether its sequence ends with the last of its tokens."""
    stops: BoolArray
    """Of each row, whether that token is a stop token, or nothing can follow it."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence. With `n > 1` the first is the leader and the others follow it."""

    key: int
    new: NewRequest
    """As it came; its other sequences have the same."""
    seed: int
    num_prompt: int
    max_total: int
    stop_ids: tuple[int, ...]
    """All token ids that end it."""
    rank: tuple[int, int]
    """(priority, number): the policy's order, smallest first. The number is that of its arrival
    and, once it has a row, that of its admission."""
    root: bytes
    """Root of its hash chain."""
    columns: Columns
    held_token_ids: Int32Array
    """Its known tokens while it has no row."""
    digests: dict[int, bytes] = field(default_factory=dict)
    """Block index -> digest of the media whose placeholders lie in the block."""
    adapter: AdapterContent | None = None
    row: int = -1
    status: Status = Status.WAITING
    finish_reason: str | None = None
    num_cached: int = -1
    """Prompt tokens found in the cache when it was first admitted; -1 before."""
    parent: Sequence | None = None
    """The sequence whose first `num_shared` tokens it can take over."""
    num_shared: int = 0
    followers: list[Sequence] = field(default_factory=list)
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    """While it has no row."""

    @property
    def request_id(self) -> str:
        return self.new.request_id

    @property
    def params(self) -> SamplingParams:
        return self.new.params

    @property
    def is_beam(self) -> bool:
        """Whether the host chooses its tokens, from those that are most likely."""
        return self.new.beam_width > 0

    @property
    def has_begun(self) -> bool:
        """Whether it, or the sequence it goes on from, has ever had a row."""
        return self.num_cached >= 0 or self.parent is not None

    @property
    def token_ids(self) -> Int32Array:
        """All tokens the host knows."""
        if self.row < 0:
            return self.held_token_ids
        return self.columns.token_ids[self.row, : self.columns.num_known[self.row]]

    @property
    def num_known(self) -> int:
        return int(self.columns.num_known[self.row]) if self.row >= 0 else len(self.held_token_ids)

    @property
    def num_before_stop(self) -> int:
        """Tokens that must come before one that may stop it; 0 or less where the next one may."""
        return self.num_prompt + self.params.min_tokens - self.num_known - 1

    @property
    def has_tokens_in_flight(self) -> bool:
        return self.row >= 0 and bool(self.columns.in_flight[self.row])

    @property
    def num_generated(self) -> int:
        """Tokens beyond the prompt, those in flight included."""
        if self.row < 0:
            return self.num_known - self.num_prompt
        c, row = self.columns, self.row
        num_tokens = int(c.num_tokens[row])
        if c.has_stages and not self.is_beam and c.num_computed[row] == num_tokens:
            num_tokens += 1
        return num_tokens - self.num_prompt

    @property
    def tables(self) -> list[Int32Array]:
        """Blocks that it holds in each group, shallowest first."""
        c, row = self.columns, self.row
        end = c.num_blocks[row]
        return [
            table[first:end]
            for table, first in zip(c.block_tables[:, row], c.first_blocks[:, row], strict=True)
        ]

    def added_row(self, row: int, num_computed: int, fork_of: int, adapter_slot: int) -> AddedRow:
        """What the device must know of it."""
        params = self.params
        num_forked = num_computed if fork_of >= 0 else 0
        num_logprobs = (params.logprobs or 0) if params.wants_logprobs else -1
        return AddedRow(
            row=row,
            token_ids=self.held_token_ids,
            num_prompt_tokens=self.num_prompt,
            num_computed_tokens=num_computed,
            params=params,
            seed=self.seed,
            stop_token_ids=self.stop_ids,
            fork_of=fork_of,
            num_forked_tokens=num_forked,
            num_logprobs=CANDIDATES_PER_BEAM * self.new.beam_width or num_logprobs,
            num_prompt_logprobs=self._num_prompt_logprobs,
            pooling=self.new.pooling,
            adapter_slot=adapter_slot,
            appends_sampled=not (self.is_beam or self.columns.has_stages),
        )

    @property
    def _num_prompt_logprobs(self) -> int:
        """Only the first sequence of a prompt computes them."""
        if self.parent is not None or not self.params.wants_prompt_logprobs:
            return -1
        return self.params.prompt_logprobs or 0

    def finished(self, tokens: Int32Array, reason: str, now: float, error: str) -> FinishedSequence:
        """Its terminal output."""
        own_ids = self.params.stop_token_ids or ()
        by_id = reason == "stop" and len(tokens) and tokens[-1] in own_ids
        return FinishedSequence(
            key=self.key,
            token_ids=tokens,
            finish_reason=reason,
            stop_reason=int(tokens[-1]) if by_id else None,
            num_cached_tokens=max(self.num_cached, 0),
            error=error or None,
            arrival_time=self.new.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            first_token_time=self.first_token_time,
            finished_time=now,
        )

    def snapshot(self, blocks: NDArray[np.uint8], has_table: bool) -> SequenceSnapshot:
        """The sequence at this moment; `blocks` are the `BlockState` of each block."""
        row = self.row
        held = np.concatenate(self.tables) if row >= 0 else empty_ints()
        return SequenceSnapshot(
            key=self.key,
            request_id=self.request_id,
            tenant=self.new.tenant,
            state=self.status.name.lower(),
            num_prompt_tokens=self.num_prompt,
            num_tokens=self.num_known,
            num_computed_tokens=int(self.columns.num_computed[row]) if row >= 0 else 0,
            arrival_time=self.new.arrival_time,
            num_blocks=len(held),
            num_owned_blocks=int((blocks[held] == BlockState.OWNED).sum()),
            block_table=held.copy() if has_table else empty_ints(),
        )

    def hold(self) -> None:
        """Keep the tokens outside the row, which is about to be given up."""
        self.held_token_ids = self.token_ids.copy()
        self.last_token_time = float(self.columns.last_token_time[self.row])
        self.row = -1


def media_digests(media: tuple[MediaSpan, ...], block_size: int) -> dict[int, bytes]:
    """Block index -> what tells the block from others with the same placeholder tokens: which
    media, by how many tokens each is represented, and which of them lie here."""
    digests: dict[int, bytes] = {}
    for span in media:
        last = (span.start + span.length - 1) // block_size
        for block in range(span.start // block_size, last + 1):
            place = (span.start - block * block_size, span.length, len(span.digest))
            key = b"".join(number.to_bytes(8, "little", signed=True) for number in place)
            digests[block] = digests.get(block, b"") + key + span.digest
    return digests


def make_sequences(
    new: NewRequest,
    *,
    rank: tuple[int, int],
    unseeded: int,
    max_total: int,
    root: bytes,
    columns: Columns,
) -> list[Sequence]:
    """The `n` sequences of a request; `unseeded` is its seed if it brings none."""
    seed = unseeded if new.params.seed is None else new.params.seed
    eos = () if new.params.ignore_eos else new.eos_token_ids
    digests = media_digests(new.media, columns.block_size)
    sequences = [
        Sequence(
            key=new.key + i,
            new=new,
            seed=derive_seed(seed, i),
            num_prompt=len(new.prompt_token_ids),
            max_total=max_total,
            stop_ids=(*eos, *(new.params.stop_token_ids or ())),
            rank=rank,
            root=root,
            digests=digests,
            columns=columns,
            held_token_ids=new.prompt_token_ids,
        )
        for i in range(new.params.n)
    ]
    leader = sequences[0]
    leader.followers = sequences[1:]
    for follower in leader.followers:
        follower.parent, follower.num_shared = leader, leader.num_prompt - 1
    return sequences


# Seeds: splitmix64, so that neighbouring inputs give unrelated ones, equal on every machine.

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """splitmix64's output function: a bijection of 64-bit integers."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_seed(seed: int, index: int) -> int:
    """Seed of completion `index` of a request; completion 0 keeps the request's own seed.

    So the first of `n` completions is the one that `n=1` would have given.
    """
    if index == 0:
        return seed & _MASK
    return _mix(seed + index * _STRIDE)


def random_seed(engine_seed: int, counter: int) -> int:
    """Seed of the `counter`-th request that brought none, reproducible from the engine's seed."""
    return _mix(_mix(engine_seed + _STRIDE) + counter * _STRIDE)
