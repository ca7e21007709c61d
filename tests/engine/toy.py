"""A toy executor: its KV cache stores what it computed, its next token hashes what it reads.

The entry of a position is a hash of its token, of the entry before it and of the first one that it
sees, read through the block table, as the KV of a real model depends on the whole prefix. The next
token hashes all entries of the context, in a KV group with a window those of the last window. So
any wrong, stale, doubly used or uncomputed block changes the output. The content of a row's adapter
is part of each hash, read through its slot and its chunks.

With several stages each has a row table and a KV cache of its own, which only plans change, and is
a step behind the stage before it. They all compute the same, and compare: what one hands to the
next must be what the next one finds by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from quire.engine.executors.base import PendingResult
from quire.files.adapter import AdapterFile
from quire.protocol.adapter import LoRARequest, chunks_for
from quire.protocol.errors import AdapterError
from quire.protocol.expert_counts import ExpertCounts
from quire.protocol.output import DeviceMemory
from quire.protocol.plan import (
    AddedRow,
    Int32Array,
    LogprobArrays,
    PooledRows,
    StepPlan,
    StepResult,
    TokenMasks,
    WaitingDrafts,
)

Windows = tuple[int | None, ...]

UNWRITTEN = -7
NO_DRAFT = -3
"""Computed where a plan counts on more drafts than wait in a row."""


class BrokenContractError(BaseException):
    """A plan that no worker could carry out. Not an `Exception`: the engine would retry the step
    and so hide it."""


class InjectedError(Exception):
    """A step that fails on purpose."""


def require(condition: bool, rule: str) -> None:
    if not condition:
        raise BrokenContractError(rule)


def mix(*values: int) -> int:
    data = b"".join(int(v).to_bytes(9, "little", signed=True) for v in values)
    return int.from_bytes(blake2b(data, digest_size=7).digest(), "little")


def ranked_tokens(entries: list[int], vocab: int, count: int) -> tuple[list[int], list[float]]:
    """The most likely next tokens after a context, and their log-probabilities."""
    context = mix(*entries)
    scores = [-(mix(context, token) % 9_999_991) / 1_000_000 for token in range(vocab)]
    order = sorted(range(vocab), key=lambda token: -scores[token])[:count]
    return order, [scores[token] for token in order]


def next_token(entries: list[int], seed: int, vocab: int) -> int:
    return mix(mix(*entries), seed, len(entries)) % vocab


def nearest(token: int, allowed: Callable[[int], bool], vocab: int) -> int:
    """What is sampled instead of a token that a grammar forbids: the first allowed one after it."""
    return next(t for t in ((token + i) % vocab for i in range(vocab)) if allowed(t))


def entries_of(tokens: list[int], window: int | None = None, adapter: str = "") -> list[int]:
    """What a correct KV cache holds for these tokens, in a group with this window. `adapter` is the
    digest of its content."""
    entries: list[int] = []
    content = () if not adapter else (content_of(adapter),)
    for position, token in enumerate(tokens):
        first = first_seen(position, window)
        before = entries[-1] if position > first else 0
        entries.append(mix(before, entries[first] if position > first else 0, token, *content))
    return entries


def chunk_of(digest: str, index: int) -> int:
    """What a chunk of an adapter holds."""
    return mix(*digest.encode(), index)


def content_of(digest: str) -> int:
    """What a device computes with that has an adapter in its chunks, as many as its rank takes."""
    return mix(*(chunk_of(digest, index) for index in range(chunks_for(rank_of(digest)))))


def rank_of(digest: str) -> int:
    """The toy adapter "b-20" has rank 20."""
    return int(digest.rpartition("-")[2])


def first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(position - window + 1, 0)


def context_of(tokens: list[int], windows: Windows = (None,), adapter: str = "") -> list[int]:
    """What the last of these tokens sees, in all groups."""
    return [
        entry
        for window in windows
        for entry in entries_of(tokens, window, adapter)[first_seen(len(tokens) - 1, window) :]
    ]


class ToyFolders:
    """Reads adapters' folders: what each holds, by a digest that ends in its rank; a folder that is
    not listed holds an adapter named as it is."""

    def __init__(self) -> None:
        self.holds: dict[str, str] = {}
        self.broken: set[str] = set()
        self.saved: dict[str, int] = {}
        """Bytes of whole weights, by digest."""

    def read(self, reference: LoRARequest) -> Future[AdapterFile]:
        reading: Future[AdapterFile] = Future()
        folder = reference.lora_path
        if folder in self.broken:
            reading.set_exception(AdapterError(f"{folder} is broken"))
            return reading
        digest = self.holds.get(folder, folder)
        rank = rank_of(digest)
        saved = self.saved.get(digest, 0)
        file = AdapterFile(
            reference.lora_name, folder, folder, {}, {}, rank, digest, rank, saved, None
        )
        reading.set_result(file)
        return reading

    def poll(self) -> None:
        pass

    def shutdown(self, failure: str = "") -> None:
        pass


@dataclass
class ToyRow:
    added: AddedRow
    tokens: list[int]
    num_computed: int
    tables: list[dict[int, int]]
    """Of each KV group: block index -> block."""
    drafts: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    """What was computed since the row was added: a hidden state is its entry's last digits."""


HiddenStates = list[tuple[int, int, list[int]]]
"""What a stage hands to the next: of each row that computed, its number, how many tokens it has and
the entries of the new ones."""


class ToyStage:
    """One stage: its rows and its KV cache."""

    def __init__(self, num_blocks: int, block_size: int, vocab: int, windows: Windows) -> None:
        self.block_size = block_size
        self.vocab = vocab
        self.windows = windows
        self.kv = np.full((num_blocks, block_size), UNWRITTEN, np.int64)
        self.rows: dict[int, ToyRow] = {}
        self.slots: dict[int, tuple[str, list[int]]] = {}
        """Of each adapter slot in use, what was placed there and in which chunks."""
        self.chunks: dict[int, int] = {}
        self.num_drafts = 0
        self.drafts_are_right = False
        self.num_proposed: Callable[[int], int] | None = None
        """How many drafts follow so many tokens; None: as many as there may be."""
        self.num_verified = 0
        self.repeats: Callable[[int], bool] | None = None
        """Whether the text gives drafts behind so many tokens; where it does not, a model drafts in
        rows that have blocks for it. None: drafts come from one or the other alone."""
        self.num_tokens_computed = 0

    def carry_out(self, plan: StepPlan) -> HiddenStates:
        for row in plan.freed_rows.tolist():
            self.rows.pop(row, None)
        for slot in plan.cleared_slots.tolist():
            self.slots.pop(slot, None)
        for placed in plan.placed_adapters:
            chunks = placed.chunks.tolist()
            self.slots[placed.slot] = placed.digest, chunks
            self.chunks.update({c: chunk_of(placed.digest, i) for i, c in enumerate(chunks)})
        for added in plan.added_rows:
            self._add(added)
        for row, length in zip(plan.cut_rows.tolist(), plan.cut_lengths.tolist(), strict=True):
            self._cut(self.rows[row], length)
        for row, token in zip(plan.append_rows.tolist(), plan.append_tokens.tolist(), strict=True):
            self.rows[row].tokens.append(token)
            self.rows[row].drafts = []
        for row, group, index, block in zip(
            plan.block_rows.tolist(),
            plan.block_groups.tolist(),
            plan.block_indices.tolist(),
            plan.block_ids.tolist(),
            strict=True,
        ):
            self.rows[row].tables[group][index] = block
        sources, targets = plan.copy_sources.tolist(), plan.copy_targets.tolist()
        require(not set(sources) & set(targets), "no block is both source and target of copies")
        self.kv[plan.copy_targets] = self.kv[plan.copy_sources]
        return [
            (number, len(self.rows[number].tokens), self._compute(self.rows[number], count))
            for number, count in zip(plan.rows.tolist(), plan.num_new_tokens.tolist(), strict=True)
        ]

    def _add(self, added: AddedRow) -> None:
        tokens = added.token_ids.tolist()
        tables: list[dict[int, int]] = [{} for _ in self.windows]
        if added.fork_of >= 0:
            parent = self.rows[added.fork_of]
            forked = added.num_forked_tokens
            require(tokens[:forked] == parent.tokens[:forked], "a fork begins as its parent does")
            shared = range(added.num_forked_tokens // self.block_size)
            tables = [{i: table[i] for i in shared if i in table} for table in parent.tables]
        self.rows[added.row] = ToyRow(added, tokens, added.num_computed_tokens, tables)

    def _cut(self, row: ToyRow, length: int) -> None:
        require(0 < length <= len(row.tokens), "a row is cut back to tokens it has")
        row.tokens, row.drafts = row.tokens[:length], []
        row.num_computed = min(row.num_computed, length - 1)

    def _entry(self, row: ToyRow, group: int, position: int) -> int:
        block = row.tables[group][position // self.block_size]
        return int(self.kv[block, position % self.block_size])

    def _context(self, row: ToyRow, num_tokens: int) -> list[int]:
        """What the last of a row's first `num_tokens` tokens sees."""
        return [
            self._entry(row, group, position)
            for group, window in enumerate(self.windows)
            for position in range(first_seen(num_tokens - 1, window), num_tokens)
        ]

    def _content(self, row: ToyRow) -> tuple[int, ...]:
        """What the chunks of its adapter hold."""
        if row.added.adapter_slot < 0:
            return ()
        require(row.added.adapter_slot in self.slots, "a row's adapter is on the device")
        _, chunks = self.slots[row.added.adapter_slot]
        return (mix(*(self.chunks[chunk] for chunk in chunks)),)

    def _compute(self, row: ToyRow, count: int) -> list[int]:
        """Returns the new entries."""
        content = self._content(row)
        known, entries = row.tokens + row.drafts, list[int]()
        for position in range(row.num_computed, row.num_computed + count):
            token = known[position] if position < len(known) else NO_DRAFT
            for group, window in enumerate(self.windows):
                first, before, oldest = first_seen(position, window), 0, 0
                if position > first:
                    before = self._entry(row, group, position - 1)
                    oldest = self._entry(row, group, first)
                block = row.tables[group][position // self.block_size]
                entry = mix(before, oldest, token, *content)
                self.kv[block, position % self.block_size] = entry
                entries.append(entry)
            row.states.append(entry % 1000)
        row.num_computed += count
        self.num_tokens_computed += count
        return entries

    def sample(self, plan: StepPlan, masks: TokenMasks | None) -> StepResult:
        tokens, counts, lines = [], [], []
        has_blocks = dict(zip(plan.rows.tolist(), (plan.num_blocks > 0).tolist(), strict=False))
        of_lines = {} if masks is None else dict(zip(masks.lines.tolist(), masks.bits, strict=True))
        for row_id, num_samples, first in zip(
            plan.rows[plan.samples].tolist(),
            plan.num_samples[plan.samples].tolist(),
            plan.first_lines.tolist(),
            strict=True,
        ):
            row = self.rows[row_id]
            require(
                row.num_computed == len(row.tokens) + num_samples - 1,
                "only a row that caught up may sample",
            )
            own_masks = [of_lines.get(first + i) for i in range(num_samples)]
            self.num_verified += min(num_samples - 1, len(row.drafts))
            accepted = self._verify(row, own_masks)
            if row.added.num_logprobs >= 0:
                lines += self._candidates(row, accepted, len(tokens))
            tokens += accepted
            counts.append(len(accepted))
            if row.added.appends_sampled:
                row.tokens += accepted
                row.num_computed = len(row.tokens) - 1
                self._propose(row)
                if self.repeats is not None and not (
                    has_blocks[row_id] or self.repeats(len(row.tokens))
                ):
                    row.drafts = []
        result = StepResult(
            plan.step, np.array(tokens, np.int32), np.array(counts, np.int32), _logprobs(lines)
        )
        result.pooled = self._pool(plan)
        if self.num_drafts:
            drafted = plan.rows[plan.samples].tolist()
            waiting = [len(self.rows[row].drafts) for row in drafted]
            result.num_drafts = np.array(waiting, np.int32)
            result.drafts = self._drafts(drafted)
            if self.repeats is not None:
                found = [self.repeats(len(self.rows[row].tokens)) for row in drafted]
                result.num_repeated = self.num_drafts * np.array(found, np.int32)
        return result

    def _drafts(self, rows: list[int]) -> WaitingDrafts | None:
        """What those with a grammar have; of `rows`, which sampled."""
        params = [self.rows[row].added.params for row in rows]
        places = [i for i, one in enumerate(params) if one.structured_outputs is not None]
        if not places:
            return None
        ids = np.full((len(places), self.num_drafts), NO_DRAFT, np.int32)
        for line, place in zip(ids, places, strict=True):
            drafts = self.rows[rows[place]].drafts
            line[: len(drafts)] = drafts
        return WaitingDrafts(np.array(places, np.int32), ids)

    def _verify(self, row: ToyRow, masks: list[Int32Array | None]) -> list[int]:
        """Tokens sampled after the known ones and after each draft, while drafts agree; a line has
        each of `masks`."""
        accepted: list[int] = []
        for i, mask in enumerate(masks):
            context = self._context(row, len(row.tokens) + i)
            token = next_token(context, row.added.seed, self.vocab)
            if mask is not None:
                bits = mask.tolist()
                token = nearest(token, lambda t: bool(bits[t // 32] >> t % 32 & 1), self.vocab)  # noqa: B023
            accepted.append(token)
            if i >= len(row.drafts) or row.drafts[i] != accepted[-1]:
                break
        return accepted

    def _candidates(
        self, row: ToyRow, accepted: list[int], place: int
    ) -> list[tuple[int, int, list[int], list[float]]]:
        count, num_tokens = row.added.num_logprobs, len(row.tokens)
        return [
            (
                place + i,
                token,
                *ranked_tokens(self._context(row, num_tokens + i), self.vocab, count),
            )
            for i, token in enumerate(accepted)
        ]

    def _propose(self, row: ToyRow) -> None:
        """Two of three drafts are what a model would sample, as long as those before it are."""
        tokens = list(row.tokens)
        row.drafts = []
        slot = row.added.adapter_slot
        adapter = "" if slot < 0 else self.slots[slot][0]
        count = self.num_drafts if self.num_proposed is None else self.num_proposed(len(tokens))
        for _ in range(count):
            context = context_of(tokens, self.windows, adapter)
            token = next_token(context, row.added.seed, self.vocab)
            if not self.drafts_are_right and mix(row.added.seed, len(tokens), -1) % 3 == 0:
                token = (token + 1) % self.vocab
            row.drafts.append(token)
            tokens.append(token)

    def _pool(self, plan: StepPlan) -> PooledRows | None:
        """The last state, or the mean of those that the row itself computed."""
        rows = [r for r in plan.rows[plan.samples].tolist() if self.rows[r].added.pooling]
        if not rows:
            return None
        vectors = [
            [
                self.rows[r].states[-1]
                if self.rows[r].added.pooling == "last"
                else float(np.mean(self.rows[r].states))
            ]
            for r in rows
        ]
        return PooledRows(np.array(rows, np.int32), np.array(vectors, np.float32))


class ToyPending:
    def __init__(self, device: ToyExecutor, step: int) -> None:
        self._device, self._step = device, step

    def result(self) -> StepResult:
        return self._device.result(self._step)


class ToyExecutor:
    failure: str | None = None
    look_s: float | None = None

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab: int,
        failing_steps: frozenset[int] = frozenset(),
        num_drafts: int = 0,
        windows: Windows = (None,),
        num_stages: int = 1,
        load_polls: int = 0,
    ) -> None:
        """After each sample `num_drafts` tokens are proposed, some of them wrong. An adapter is
        loaded after `load_polls` polls."""
        self._load_polls = load_polls
        self._loading: list[tuple[int, str, str, Future[None]]] = []
        """With the poll after which each is there, or what is wrong with it."""
        self._num_polls = 0
        self.hosted: set[str] = set()
        """Adapters in host memory."""
        self.vanished: set[str] = set()
        """Folders that can no longer be read, and contents that they no longer have."""
        self.num_blocks = num_blocks
        self.failing_steps = failing_steps
        self.stages = [ToyStage(num_blocks, block_size, vocab, windows) for _ in range(num_stages)]
        self.last = self.stages[-1]
        self.last.num_drafts = num_drafts
        self.plan: StepPlan | None = None
        """The last one, which is to be sampled from."""
        self.down: set[int] = set()
        """Stages in which a step failed that was not seen to fail yet: until then no later one gets
        through either. The stages before them know nothing of it."""
        self._waiting = [deque[tuple[StepPlan, HiddenStates]]() for _ in self.stages]
        """What each stage has still to do."""
        self._computed: dict[int, StepPlan] = {}
        """Steps that are through the last stage, and wait for their masks."""
        self._masks: dict[int, TokenMasks | None] = {}
        """Of steps that are to be sampled."""
        self._results: dict[int, StepResult] = {}

    @property
    def num_tokens_computed(self) -> int:
        return self.last.num_tokens_computed

    def execute(self, plan: StepPlan) -> None:
        self.plan = plan
        for placed in plan.placed_adapters:
            require(placed.digest in self.hosted, "only what is in host memory is placed")
        for stage in reversed(range(1, len(self.stages))):
            if self._waiting[stage]:
                self._carry_out(stage)
        self._waiting[0].append((plan, []))
        self._carry_out(0)

    def _carry_out(self, stage: int) -> None:
        plan, received = self._waiting[stage].popleft()
        if plan.step in self.failing_steps and stage == plan.step % len(self.stages):
            self.down.add(stage)
        if stage in self.down:  # nothing of the step reaches it
            return
        states = self.stages[stage].carry_out(plan)
        require(not stage or states == received, "all stages have the same rows")
        if stage + 1 < len(self.stages):
            self._waiting[stage + 1].append((plan, states))
        else:
            self._computed[plan.step] = plan
            self._sample(plan.step)

    def _sample(self, step: int) -> None:
        """Once it is computed, and its masks are there."""
        if step in self._computed and step in self._masks:
            plan = self._computed.pop(step)
            self._results[step] = self.last.sample(plan, self._masks.pop(step))

    def token_masks(self, lines: Int32Array, num_words: int) -> TokenMasks:
        return TokenMasks(lines, np.zeros((len(lines), num_words), np.int32))

    def sample(self, step: int, masks: TokenMasks | None = None) -> PendingResult:
        assert self.plan is not None and self.plan.step == step
        self._masks[step] = masks
        self._sample(step)
        return ToyPending(self, step)

    def result(self, step: int) -> StepResult:
        """Let the step through the stages that it still has before it."""
        for stage in range(1, len(self.stages)):
            while self._waiting[stage] and self._waiting[stage][0][0].step <= step:
                self._carry_out(stage)
        if step in self._results:
            return self._results.pop(step)
        self.down.clear()  # it works again once the failure was seen
        for waiting in (*self._waiting, self._computed, self._masks):
            waiting.clear()
        raise InjectedError(f"injected failure of step {step}")

    def memory(self) -> DeviceMemory:
        """A device of 1000 bytes per block, a quarter of it taken by this and that."""
        kv = 1000 * self.num_blocks
        return DeviceMemory(total=4 * kv, used=3 * kv, weights=kv, kv_block=1000)

    def expert_counts(self) -> ExpertCounts:
        return ExpertCounts.none()

    def load_adapter(self, name: str, folder: str, digest: str) -> Future[None]:
        loading: Future[None] = Future()
        gone = f"adapter {name!r}: {folder} is gone" if self.vanished & {folder, digest} else ""
        self._loading.append((self._num_polls + self._load_polls, digest, gone, loading))
        self._end_loading()
        return loading

    def _end_loading(self) -> None:
        for entry in [one for one in self._loading if one[0] <= self._num_polls]:
            _, digest, gone, loading = entry
            self._loading.remove(entry)
            if gone:
                loading.set_exception(AdapterError(gone))
            else:
                self.hosted.add(digest)
                loading.set_result(None)

    def drop_adapter(self, digest: str) -> None:
        self.hosted.discard(digest)

    def listen(self) -> None:
        self._num_polls += 1
        self._end_loading()

    def shutdown(self, failure: str = "") -> None:
        for stage in self.stages:
            stage.rows.clear()


def _logprobs(lines: list[tuple[int, int, list[int], list[float]]]) -> LogprobArrays | None:
    if not lines:
        return None
    width = 1 + max(len(ids) for _, _, ids, _ in lines)
    token_ids = np.full((len(lines), width), -1, np.int32)
    logprobs = np.full((len(lines), width), -np.inf, np.float32)
    for line, (_, token, ids, values) in enumerate(lines):
        token_ids[line, : 1 + len(ids)] = [token, *ids]
        logprobs[line, : 1 + len(ids)] = [0.0, *values]
    index = np.array([i for i, *_ in lines], np.int32)
    return LogprobArrays(index, token_ids, logprobs, np.ones(len(lines), np.int32))
