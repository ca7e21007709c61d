"""`Grammars`: everything the step loop does for requests with structured output.

A request waits, not ready, until its grammar is compiled. Then, in each step, the masks of the
constrained rows are made while the device computes, tokens are matched when their step is applied,
and tokens that leave no choice are appended at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from quire.config.structured import GrammarSettings
from quire.engine.executors.base import Executor
from quire.engine.structured_output.compiler import Compilation, GrammarCompiler
from quire.engine.structured_output.matcher import Batch, Growth, Matcher
from quire.protocol.errors import QuireError
from quire.protocol.output import FinishedSequence, StepOutput
from quire.protocol.plan import BoolArray, StepPlan, StepResult, TokenMasks
from quire.protocol.request import NewRequest
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence, Status

if TYPE_CHECKING:
    from llguidance import LLExecutor

POLL_S = 0.002
"""How often a loop without other work looks for grammars that are compiled."""


class Grammars:
    def __init__(
        self,
        scheduler: Scheduler,
        settings: GrammarSettings,
        num_threads: int = 1,
        num_stages: int = 1,
    ) -> None:
        """At most `num_threads` threads make masks."""
        self.compiler = GrammarCompiler(settings)
        self._num_threads = num_threads
        self._growth = Growth(num_threads)
        self._scheduler = scheduler
        self._settings = settings
        self._pending: dict[str, tuple[NewRequest, Compilation, Future[None]]] = {}
        self._matchers: dict[int, Matcher] = {}
        """By the key of a sequence."""
        self._batches: deque[Batch] = deque(maxlen=num_stages)
        """Those of the last plans: in a pipeline rows take turns."""
        self._sampled: list[tuple[Sequence, Matcher]] = []
        """Whose token the last `consume` took in."""
        self._threads: LLExecutor | None = None

    # --- requests come and go -------------------------------------------------------------------

    def compile(self, new: NewRequest) -> Compilation | None:
        """Begin to compile a request's grammar, if it has one; raises if it is wrong for sure."""
        if new.params.structured_outputs is None:
            return None
        compilation = self.compiler.compile(new.params.structured_outputs)
        if compilation.is_over:
            compilation.result()
        return compilation

    def add(self, new: NewRequest, compilation: Compilation) -> Future[None] | None:
        """Take in a request that the scheduler has. None: it can run; otherwise it is held back,
        and the future tells whether its grammar can be enforced."""
        accepted: Future[None] = Future()
        accepted.set_running_or_notify_cancel()  # a waiting caller may not cancel it
        self._pending[new.request_id] = new, compilation, accepted
        self.poll()
        return None if accepted.done() and accepted.exception() is None else accepted

    @property
    def is_compiling(self) -> bool:
        return bool(self._pending)

    def poll(self) -> None:
        """Let requests run whose grammars are compiled; refuse those whose grammars are wrong."""
        if self._matchers and self._growth.poll(self._matchers.values()):
            self._batches.clear()
        for request_id, (new, compilation, accepted) in list(self._pending.items()):
            if not compilation.is_over:
                continue
            del self._pending[request_id]
            if not self._scheduler.is_held_back(request_id):  # aborted, or out of time
                accepted.set_result(None)
                continue
            try:
                self._start(new, compilation)
            except QuireError as error:
                self._scheduler.fail_request(request_id, str(error))
                accepted.set_exception(error)
            else:
                accepted.set_result(None)

    def _start(self, new: NewRequest, compilation: Compilation) -> None:
        grammar = compilation.result()
        for key in range(new.key, new.key + new.params.n):
            self._matchers[key] = Matcher(grammar, new.params, new.eos_token_ids)
        self._growth.consider(grammar)
        self._scheduler.make_ready(new.request_id)

    def forget(self, finished: Iterable[FinishedSequence]) -> None:
        if self._matchers:
            for sequence in finished:
                matcher = self._matchers.pop(sequence.key, None)
                if matcher is not None:
                    matcher.leave()

    def shutdown(self) -> None:
        for _, _, accepted in self._pending.values():
            accepted.set_result(None)  # its last output says what happened
        self._pending.clear()
        self.compiler.shutdown()
        self._growth.shutdown()

    # --- in a step ------------------------------------------------------------------------------

    def masks(self, plan: StepPlan, executor: Executor) -> TokenMasks | None:
        """Which tokens the rows that sample may get; made while the device computes."""
        batch = self._batch_of(plan)
        if batch is None:
            return None
        masks = executor.token_masks(batch.lines, batch.num_words)
        has_one_choice = batch.fill(masks.bits, self._pool)
        if self._settings.jump_ahead:
            # Where there is no choice there may be none for long: the row waits, and then jumps.
            self._scheduler.set_synchronous(batch.rows, has_one_choice & batch.may_jump)
        return masks

    def need_tokens_in_flight(self, plan: StepPlan) -> bool:
        """Whether masks for a plan can only be made once the step before it is applied."""
        return bool(self._matchers) and self._scheduler.awaits_constrained(plan)

    def _batch_of(self, plan: StepPlan) -> Batch | None:
        """The constrained sequences that a plan samples for, those that still run."""
        if not self._matchers:
            return None
        for batch in self._batches:
            if batch.is_that_of(plan, self._scheduler.epochs(batch.rows)):
                break
        else:
            places, sequences = self._scheduler.constrained(plan)
            members = [(sequence, self._matchers[sequence.key]) for sequence in sequences]
            batch = Batch(plan, places, members)
            self._batches.append(batch)
        return batch if batch.members else None

    def consume(self, plan: StepPlan, result: StepResult, now: float) -> BoolArray | None:
        """Match a step's tokens, just before it is applied. Says of each of them whether its text
        ends because nothing can follow. What cannot go on ends here: its token is none, and must
        not be taken for an end of the text."""
        self._sampled = []
        batch = self._batch_of(plan)
        if batch is None:
            return None
        ends = np.cumsum(result.counts)[batch.places].tolist()
        counts = result.counts[batch.places].tolist()
        complete = np.zeros(len(result.tokens), np.bool_)
        for (sequence, matcher), end, count in zip(batch.members, ends, counts, strict=True):
            place = self._consume(sequence, matcher, result.tokens[end - count : end].tolist())
            if place is not None:
                complete[end - count + place] = True
            if matcher.failure is not None:
                ended = self._scheduler.end(sequence, "error", now, error=matcher.failure)
                ended.is_own_fault = True
        if result.drafts is not None and result.num_drafts is not None:
            waiting = result.drafts.of(batch.places, result.num_drafts)
            for (_, matcher), drafts in zip(batch.members, waiting, strict=True):
                matcher.drafts = drafts
        return complete

    def _consume(self, sequence: Sequence, matcher: Matcher, tokens: list[int]) -> int | None:
        """Match the tokens of a row up to the one that ends its text. Returns its place if nothing
        can follow it."""
        for place, token in enumerate(tokens):
            if token in sequence.stop_ids and sequence.num_before_stop <= place:
                matcher.check_end(token)  # it ends the sequence, and is no part of the text
                return None
            matcher.consume(token, place)
            if matcher.failure is not None or matcher.is_complete:
                break
        self._sampled.append((sequence, matcher))
        return place if matcher.is_complete else None

    def advance(self, output: StepOutput, now: float) -> None:
        """After a step is applied: append what can only follow, else cut the drafts that wait."""
        shown: list[tuple[int, int]] = []
        for sequence, matcher in self._sampled:
            if sequence.status is not Status.RUNNING or sequence.has_tokens_in_flight:
                continue
            may_jump = self._settings.jump_ahead and matcher.may_jump
            if may_jump and (tokens := matcher.forced()):
                complete = matcher.is_complete
                tokens = self._scheduler.append_forced(sequence, tokens, complete, now)
                if sequence.new.streams:
                    shown += [(sequence.key, token) for token in tokens]
            elif matcher.drafts:
                self._scheduler.keep_drafts(sequence, matcher.num_allowed_drafts)
        if shown:
            keys, ids = np.array(shown, np.int64).T
            output.keys = np.append(output.keys, keys)
            output.tokens = np.append(output.tokens, ids.astype(np.int32))

    def _pool(self) -> LLExecutor:
        if self._threads is None:
            from llguidance import LLExecutor

            self._threads = LLExecutor(self._num_threads)
        return self._threads
