"""`Grammars`: everything the step loop does for requests whose answers must have a form.

A request waits, not ready, until its grammar is compiled. Then, in each step, the masks of the
constrained rows are made while the device computes, tokens are matched when their step is applied,
and tokens that leave no choice are appended at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from quire.config.structured import GrammarSettings
from quire.engine.executors.base import Executor, TokenMasks
from quire.engine.grammar.compiler import Compilation, GrammarCompiler
from quire.engine.grammar.matcher import Matcher
from quire.protocol.errors import QuireError
from quire.protocol.output import FinishedSequence, StepOutput
from quire.protocol.plan import BoolArray, StepPlan, StepResult
from quire.protocol.request import NewRequest
from quire.protocol.sampling import SamplingParams
from quire.scheduler.failure import fail_request
from quire.scheduler.request import Request, Status
from quire.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from llguidance import LLExecutor

POLL_S = 0.002
"""How often a loop without other work looks for grammars that are compiled."""


class Grammars:
    def __init__(self, scheduler: Scheduler, settings: GrammarSettings) -> None:
        self.compiler = GrammarCompiler(settings)
        self._scheduler = scheduler
        self._settings = settings
        self._pending: dict[str, tuple[NewRequest, Compilation, Future[None]]] = {}
        self._matchers: dict[int, Matcher] = {}
        """By the key of a sequence."""
        self._sampled: list[Request] = []
        """Whose token the last `consume` took in."""
        self._threads: LLExecutor | None = None

    # --- requests come and go -------------------------------------------------------------------

    def compile(self, new: NewRequest) -> Compilation | None:
        """Begin to compile a request's form, if it has one; raises if that is known to be wrong."""
        if new.params.structured_outputs is None:
            return None
        compilation = self.compiler.compile(new.params.structured_outputs)
        if compilation.is_over:
            compilation.result()
        return compilation

    def add(self, new: NewRequest, compilation: Compilation) -> Future[None] | None:
        """Take in a request that the scheduler has. None: it can run; otherwise it is held back,
        and the future tells whether its form can be enforced."""
        if compilation.is_over:
            self._start(new, compilation)
            return None
        accepted: Future[None] = Future()
        accepted.set_running_or_notify_cancel()  # whoever waits for it may not cancel it
        self._pending[new.request_id] = new, compilation, accepted
        return accepted

    @property
    def is_compiling(self) -> bool:
        return bool(self._pending)

    def poll(self) -> None:
        """Let requests run whose grammars are there; refuse those whose forms are wrong."""
        for request_id, (new, compilation, accepted) in list(self._pending.items()):
            if not compilation.is_over:
                continue
            del self._pending[request_id]
            if request_id not in self._scheduler.unready:  # aborted, or out of time
                accepted.set_result(None)
                continue
            try:
                self._start(new, compilation)
            except QuireError as error:
                fail_request(self._scheduler, request_id, str(error))
                accepted.set_exception(error)
            else:
                accepted.set_result(None)

    def _start(self, new: NewRequest, compilation: Compilation) -> None:
        grammar = compilation.result()
        for key in range(new.key, new.key + new.params.n):
            self._matchers[key] = Matcher(grammar, new.params, new.eos_token_ids)
        self._scheduler.make_ready(new.request_id)

    def forget(self, finished: Iterable[FinishedSequence]) -> None:
        if self._matchers:
            for sequence in finished:
                self._matchers.pop(sequence.key, None)

    def shutdown(self) -> None:
        for _, _, accepted in self._pending.values():
            accepted.set_result(None)  # its last output says what happened
        self._pending.clear()
        self.compiler.shutdown()

    # --- in a step ------------------------------------------------------------------------------

    def masks(self, plan: StepPlan, executor: Executor) -> TokenMasks | None:
        """What the sampled rows may choose; the device computes meanwhile."""
        if not self._matchers:
            return None
        lines = np.flatnonzero(self._scheduler.columns.constrained[plan.rows[plan.samples]])
        if not len(lines):
            return None
        matchers = [
            self._matchers[key]
            for key in self._scheduler.columns.keys[plan.rows[plan.samples][lines]].tolist()
        ]
        masks = executor.token_masks(lines.astype(np.int32), matchers[0].num_words)
        bits = masks.bits
        self._pool().unsafe_compute_mask_ptr(
            [(matcher.native, i) for i, matcher in enumerate(matchers)],
            bits.ctypes.data,
            bits.strides[0],
            len(bits),
        )
        for matcher, line in zip(matchers, bits, strict=True):
            matcher.adjust(line)
        return masks

    def consume(self, plan: StepPlan, result: StepResult) -> BoolArray | None:
        """Match a step's tokens, just before it is applied. Says which samples end their text
        because nothing can follow."""
        self._sampled = []
        if not self._matchers:
            return None
        c, rows = self._scheduler.columns, plan.rows[plan.samples]
        live = (c.epoch[plan.rows] == plan.epochs)[plan.samples] & c.constrained[rows]
        if not live.any():
            return None
        complete = np.zeros(len(rows), np.bool_)
        for i in np.flatnonzero(live).tolist():
            request = self._scheduler.by_row[rows[i]]
            assert request is not None
            token = int(result.tokens[i])
            if token in request.stop_ids:
                continue  # it ends the request, and is no part of the text
            matcher = self._matchers[request.key]
            matcher.consume(token)
            complete[i] = matcher.is_complete
            self._sampled.append(request)
        return complete

    def advance(self, output: StepOutput, now: float) -> None:
        """After a step is applied: end what cannot go on, append what can only follow."""
        shown: list[tuple[int, int]] = []
        for request in self._sampled:
            if request.status is not Status.RUNNING:
                continue
            matcher = self._matchers[request.key]
            if matcher.failure is not None:
                self._scheduler.end(request, "error", now, error=matcher.failure)
            elif self._settings.jump_ahead and may_jump(request.params):
                tokens = self._jump(request, matcher, now)
                if request.new.streams:
                    shown += [(request.key, token) for token in tokens]
        if shown:
            keys, ids = np.array(shown, np.int64).T
            output.keys = np.append(output.keys, keys)
            output.tokens = np.append(output.tokens, ids.astype(np.int32))

    def _jump(self, request: Request, matcher: Matcher, now: float) -> list[int]:
        """Append the tokens that can only follow; returns them."""
        room = request.max_total - request.num_known
        too_early = request.num_prompt + request.params.min_tokens - request.num_known - 1
        tokens, stops = matcher.forced(), matcher.is_complete
        for place, token in enumerate(tokens):
            if token in request.stop_ids and place >= too_early:
                tokens, stops = tokens[: place + 1], True
                break
        if len(tokens) > room:
            tokens, stops = tokens[:room], False
        if tokens:
            self._scheduler.append_tokens(request, tokens)
            self._scheduler.metrics.generated(len(tokens), np.zeros(0), now)
        if stops:
            self._scheduler.end(request, "stop", now)
        elif len(tokens) == room:
            self._scheduler.end(request, "length", now)
        return tokens

    def _pool(self) -> LLExecutor:
        if self._threads is None:
            from llguidance import LLExecutor

            self._threads = LLExecutor()
        return self._threads


def may_jump(params: SamplingParams) -> bool:
    """Whether tokens may be appended that no sampler has seen: they have no logprobs, and no other
    rule was asked about them."""
    return not (params.wants_logprobs or params.allowed_token_ids or params.bad_words)
