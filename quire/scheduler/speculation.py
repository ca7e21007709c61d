"""`Speculation`: how many drafts each row verifies in a step."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.config.speculative import Schedule, SpeculativeConfig, scheduled_drafts
from quire.protocol.plan import BoolArray, Int32Array, StepPlan, StepResult
from quire.scheduler.sequence import Columns

FloatArray = NDArray[np.float64]


class Speculation:
    """Rows get as many drafts as they may have, or as pay; 0 is plain decoding."""

    def __init__(
        self,
        columns: Columns,
        config: SpeculativeConfig | None = None,
        max_step_tokens: int = 1 << 20,
    ) -> None:
        self._columns = columns
        self.num_drafts = 0 if config is None else config.num_tokens
        """Most drafts of a row; the workers have a drafter that proposes as many."""
        self._first_drafts = 0 if config is None or config.reads_text else config.num_tokens
        """Expected of a row that has reported none yet."""
        self._longest = None if config is None else config.max_model_len
        self._schedule: Schedule = () if config is None else config.schedule
        self._value: DraftValue | None = None
        if config is not None and config.is_measured:
            self._value = DraftValue(len(columns.running), config.num_tokens)
        self._passes: PassesValue | None = None
        if self._value is not None and config is not None and config.uses_model:
            num_rows, costs = len(columns.running), self._value.costs
            self._passes = PassesValue(num_rows, config.num_tokens, costs, max_step_tokens)

    def drafts(self, rows: Int32Array, num_decoding: int) -> Int32Array:
        """Drafts that each of `rows` may verify once it has computed its known tokens, as
        `num_decoding` of them have with the token that they are given anyway.

        The device proposes them after a row's first sample; while a step is in flight, as many are
        expected as waited after the last that has reported. Tokens are counted at their upper
        bound, so that none can lie beyond the row's end. Where the host chooses tokens (beams),
        there are none.
        """
        c = self._columns
        may = c.has_sampled[rows] & ~c.host_chooses[rows] & c.speculates[rows]
        room = c.max_total[rows] - c.num_tokens[rows] - 1
        most = np.minimum(c.num_waiting_drafts[rows], self._scheduled(num_decoding))
        drafts = np.where(may, np.clip(room, 0, most), 0).astype(np.int32)
        if self._passes is not None and self._passes.is_measuring():
            return np.zeros_like(drafts)
        if self._value is None or not drafts.any():
            return drafts
        if self._passes is not None and (tried := self._passes.tried(rows)).any():
            return np.where(tried, drafts, 0)
        return self._value.worthwhile(rows, drafts, num_decoding)

    def _scheduled(self, num_decoding: int) -> int:
        return scheduled_drafts(self._schedule, num_decoding, self.num_drafts)

    def joined(self, row: int) -> None:
        """A sequence has taken a row."""
        self._columns.num_waiting_drafts[row] = self._first_drafts
        if self._value is not None:
            self._value.forget(row)
        if self._passes is not None:
            self._passes.forget(row)

    def planned(self, plan: StepPlan, now: float) -> None:
        if self._value is not None:
            self._value.costs.planned(plan, now)

    def blocks_for_drafts(self, plan: StepPlan) -> Int32Array:
        """Blocks of each row of a plan that a draft model computes in: none where it has nothing to
        do, as for texts that are longer than it drafts for, or where its drafts do not pay."""
        c, rows = self._columns, plan.rows
        may = np.ones(len(rows), np.bool_)
        if self._longest is not None:
            computed = np.minimum(c.computed_before[rows], c.num_known[rows] - 1)
            may = computed < self._longest
        if self._passes is not None:
            may &= c.speculates[rows] & ~c.host_chooses[rows]
            num_drafts = self._scheduled(int(np.count_nonzero(plan.samples)))
            may = self._passes.choose(plan, may, num_drafts)
        return np.where(may, c.num_blocks[rows], 0).astype(np.int32)

    def num_verified(self, plan: StepPlan) -> Int32Array:
        """Drafts that each row that samples has verified in a step which is applied now: as many
        as it has lines for, of those that waited after the step before."""
        waiting = self._columns.num_waiting_drafts[plan.rows[plan.samples]]
        return np.minimum(plan.num_samples[plan.samples] - 1, waiting)

    def applied(self, plan: StepPlan, result: StepResult, live: BoolArray, now: float) -> None:
        """Take in what a step says of drafts: how many wait now, and how many were accepted."""
        if self._passes is not None:
            self._passes.applied(plan, self.num_verified(plan), result, live)
        if self._value is not None:
            self._value.costs.applied(plan.step, now)
            if plan.has_drafts:
                self._value.verified(plan, self.num_verified(plan), result, live)
        if result.num_drafts is not None:
            kept = live[plan.samples]
            rows = plan.rows[plan.samples][kept]
            self._columns.num_waiting_drafts[rows] = result.num_drafts[kept]


FORGETTING = 0.9
"""Weight of a verification when the next one of its row is counted."""
PRIOR = 2.0
"""A row counts as many drafts as these like the rows before it, until it has its own."""
FIRST_GUESS = 0.5
MIN_GAIN = 1.02
"""Drafts must make a step so many times as productive to be verified."""
TRIAL_SHARE = 0.005
"""Share of the time that drafts may cost which are tried although they do not seem to pay."""
PLAIN_STEPS = 3
"""So many go without drafts where no step of about as many rows was measured: with prompts in all
of them it never is."""


class DraftValue:
    """Weighs what drafts bring, by how many of a row's were accepted, against what they cost, by
    the times of steps with more and fewer lines."""

    def __init__(self, num_rows: int, num_drafts: int) -> None:
        self.costs = StepCosts()
        self._accepted = np.zeros(num_rows)
        self._verified = np.zeros(num_rows)
        """Of each row, drafts that were accepted, and those whose predecessors were."""
        self._share = FIRST_GUESS
        """Accepted drafts of all rows."""
        self._powers = np.arange(1, num_drafts + 1)
        self._credit_s = 0.0
        """Time that trials may take."""
        self._plain_steps = PLAIN_STEPS

    def forget(self, row: int) -> None:
        self._accepted[row] = self._verified[row] = 0.0

    def verified(
        self, plan: StepPlan, num_drafts: Int32Array, result: StepResult, live: BoolArray
    ) -> None:
        """Each row that samples has verified so many drafts."""
        samples = plan.samples
        looked = live[samples] & (num_drafts > 0)
        rows, num_drafts = plan.rows[samples][looked], num_drafts[looked]
        if not len(rows):
            return
        accepted = result.counts[looked] - 1
        verified = np.minimum(accepted + 1, num_drafts)
        self._accepted[rows] = FORGETTING * self._accepted[rows] + accepted
        self._verified[rows] = FORGETTING * self._verified[rows] + verified
        share, weight = accepted.sum() / verified.sum(), 1 - FORGETTING
        self._share += weight * (share - self._share)

    def worthwhile(self, rows: Int32Array, most: Int32Array, num_decoding: int) -> Int32Array:
        """Of `most` drafts of each of `rows` those that make a step more productive; others now
        and then, to learn whether that has changed; and none in a first step or two, to learn what
        the others are compared with."""
        if self._plain_steps and not self.costs.knows_plain(num_decoding):
            self._plain_steps -= 1
            return np.zeros_like(most)
        self._plain_steps = PLAIN_STEPS
        accepted = self._accepted[rows] + PRIOR * self._share
        share = accepted / (self._verified[rows] + PRIOR)
        gains = share[:, None] ** self._powers
        gains[self._powers > most[:, None]] = -1.0
        order = np.argsort(-gains, axis=None, kind="stable")[: int(most.sum())]
        tokens = num_decoding + np.cumsum(gains.ravel()[order])
        plain = self.costs.plain(num_decoding)
        seconds = self.costs.drafted(num_decoding, len(order))
        rate = tokens / seconds
        best = int(np.argmax(rate))
        count = best + 1 if rate[best] > MIN_GAIN * num_decoding / plain else 0
        if count == 0:
            gain = plain * (tokens[0] - num_decoding) / num_decoding
            count = self._trial(plain, seconds[0] - plain - gain)
        chosen = order[:count] // len(self._powers)
        return np.bincount(chosen, minlength=len(rows)).astype(np.int32)

    def _trial(self, plain: float, loss: float) -> int:
        """How many drafts to verify although they do not seem to pay: 1, once there is time for
        it."""
        self._credit_s = min(self._credit_s + TRIAL_SHARE * plain, max(10 * plain, loss))
        if loss > self._credit_s:
            return 0
        self._credit_s -= max(loss, 0.0)
        return 1


MAX_BEHIND = 1024
"""Tokens that a draft model makes up for in a row; where it lacks more it drafts no longer."""
TRIAL_STEPS = 16
"""Steps in which a model drafts although that does not seem to pay."""
PASSES_SHARE = 0.004
"""Share of the time that these may cost."""
PASSES_FORGETTING = 0.97
"""Weight of a step after passes when the next one of its row is counted."""
POOR_GAIN = 0.1
"""A row is drafted for by the model if so many of its drafts are accepted in a step."""
ENOUGH_STEPS = 12.0
"""Weight of the steps after which a row's own figure counts for that."""
REST = 0.98
"""Weight that a row's figure keeps for each step without passes."""


class PassesValue:
    """Says behind which steps a model drafts, and for which rows, by what its drafts bring and its
    passes cost. Rows whose text repeats itself are left to drafts from the text.

    Where it does not draft the model computes nothing, prompts neither. What it lacks it makes up
    for when it goes on, up to `MAX_BEHIND` tokens of a row.
    """

    def __init__(
        self, num_rows: int, num_drafts: int, costs: StepCosts, max_step_tokens: int
    ) -> None:
        self._num_drafts, self._costs = num_drafts, costs
        self._max_step_tokens = max_step_tokens
        self._behind = np.zeros(num_rows, np.int64)
        """Tokens of each row that the model lacks, at most."""
        self._accepted, self._steps = np.zeros((2, num_rows))
        """Of each row, drafts of the model that were accepted, and steps after its passes."""
        self._has_passed, self._repeats = np.zeros((2, num_rows), np.bool_)
        """Whether the drafts that wait are the model's, and whether the text gives as many."""
        self._gain = float((FIRST_GUESS ** np.arange(1, num_drafts + 1)).sum())
        """Drafts of the model that a row accepts in a step."""
        self._pays, self._may_try = True, False
        self._credit_s, self._trial_steps = 0.0, 0
        """Time that trials may take, and steps that are left of one."""
        self._plain_steps = self._measuring_steps = PLAIN_STEPS
        self._num_drafting = 0
        """Rows that it drafted for behind the last step."""
        self._is_weighing = False
        self._weighed = set[int]()
        """Steps of which drafts that wait were weighed, and verified or not."""

    def forget(self, row: int) -> None:
        self._behind[row] = self._accepted[row] = self._steps[row] = 0
        self._has_passed[row] = self._repeats[row] = False

    def choose(self, plan: StepPlan, may: BoolArray, num_drafts: int) -> BoolArray:
        """Rows of a plan that the model computes in, and drafts for if they sample; of those that
        it may draft for, `num_drafts` tokens each."""
        rows, samples, decodes = plan.rows, plan.samples, plan.num_new_tokens == plan.num_samples
        poor = self._accepted[rows] < POOR_GAIN * self._steps[rows]
        poor &= self._steps[rows] > ENOUGH_STEPS
        missing = self._behind[rows] + plan.num_new_tokens
        may = may & ~poor & ~self._repeats[rows] & (self._behind[rows] <= MAX_BEHIND)
        if self._is_weighing:
            self._weighed.add(plan.step)
        self._is_weighing = False
        is_on = False
        if num_drafts and decodes.any():
            is_on = self._decide(rows[may & decodes], int(np.count_nonzero(decodes)))
        # What is left out of a prompt is soon too much to be made up for.
        reads_prompts = self._pays or self._trial_steps > 0 or self._may_try
        uses = may & np.where(decodes, is_on, reads_prompts)
        uses &= np.cumsum(np.where(uses, missing, 0)) <= self._max_step_tokens
        drafting = uses & samples
        made_up = int(self._behind[rows[drafting]].sum())
        if not self._pays:
            self._credit_s -= self._costs.reading(int(missing[uses & ~decodes].sum()))
        self._behind[rows] = np.where(uses, 0, missing)
        self._accepted[rows[~uses]] *= REST
        self._steps[rows[~uses]] *= REST
        self._num_drafting = int(np.count_nonzero(drafting))
        self._costs.passes_planned(self._num_drafting, made_up)
        return uses

    def _decide(self, rows: Int32Array, num_decoding: int) -> bool:
        """Whether it drafts behind a step with so many rows that decode, for `rows` of them."""
        costs, count = self._costs, len(rows)
        if self._plain_steps and not costs.knows_plain(num_decoding):
            self._plain_steps -= 1
            return False
        self._plain_steps = PLAIN_STEPS
        plain = costs.plain(num_decoding)
        gains = (self._accepted[rows] + PRIOR * self._gain) / (self._steps[rows] + PRIOR)
        gain = float(gains.sum()) if count else num_decoding * self._gain
        drafting = count or num_decoding
        num_lines = min(int(np.ceil(gain)) + drafting, drafting * self._num_drafts)
        seconds = costs.drafted(num_decoding, drafting * self._num_drafts) + costs.passes(drafting)
        tokens = 1 + gain / num_decoding
        self._pays = tokens * plain > MIN_GAIN * seconds[num_lines - 1]
        if self._pays:
            self._trial_steps = 0
            return True
        price = TRIAL_STEPS * max(float(seconds[-1]) - tokens * plain, 0.0)
        price += costs.reading(int(self._behind[rows].sum()))
        return self._tries(plain, price, count)

    def _tries(self, plain: float, price: float, count: int) -> bool:
        """Whether it is tried all the same, once there is time for what the model lacks and for as
        many steps as show whether it pays now."""
        self._credit_s = min(self._credit_s + PASSES_SHARE * plain, max(10 * plain, price))
        self._may_try = price <= self._credit_s and not self._trial_steps
        if self._may_try and count:
            self._trial_steps, self._may_try = TRIAL_STEPS, False
            self._credit_s -= price
        if not self._trial_steps:
            return False
        self._trial_steps -= 1
        return True

    def tried(self, rows: Int32Array) -> BoolArray:
        """Rows whose drafts are verified as a trial."""
        self._is_weighing = True
        return self._has_passed[rows] & (self._trial_steps > 0)

    def is_measuring(self) -> bool:
        """Whether no draft is verified now, to learn what passes cost."""
        if not self._num_drafting or self._costs.knows_passes(self._num_drafting):
            self._measuring_steps = PLAIN_STEPS
            return False
        self._measuring_steps -= 1
        return self._measuring_steps >= 0

    def applied(
        self, plan: StepPlan, num_verified: Int32Array, result: StepResult, live: BoolArray
    ) -> None:
        kept = live[plan.samples]
        rows = plan.rows[plan.samples]
        looked = kept & self._has_passed[rows]
        if plan.step in self._weighed and looked.any():
            accepted = np.where(num_verified > 0, result.counts - 1, 0)[looked]
            seen = rows[looked]
            self._accepted[seen] = PASSES_FORGETTING * self._accepted[seen] + accepted
            self._steps[seen] = PASSES_FORGETTING * self._steps[seen] + 1
            self._gain += (1 - PASSES_FORGETTING) * (float(accepted.mean()) - self._gain)
        self._weighed = {step for step in self._weighed if step > plan.step}
        if len(plan.num_blocks):
            self._has_passed[rows[kept]] = plan.num_blocks[plan.samples][kept] > 0
        if result.num_repeated is not None:
            self._repeats[rows[kept]] = result.num_repeated[kept] >= self._num_drafts


SMALL = 16
"""Steps of up to so many lines are told apart; of larger ones those of about one size are not."""
PER_OCTAVE = 8
MAX_SURPRISE = 2.0
"""A step that takes more times as long as others of its size is counted as this."""
FIRST_SURPRISE = 4.0
"""The same for the first step of a size, against what was expected of it."""
KNOWN_RATIO = 1.5
"""Sizes that differ by less count as about the same."""
SMOOTHING = 0.1
READING_SMOOTHING = 0.3
UNMEASURED_READING = 0.002
"""By what share of its passes a draft model is taken to need for a token that it makes up for,
until that is measured."""
UNMEASURED_SLOPE = 0.02
"""By what share a step is taken to grow with each line, until two sizes are measured."""


class StepTimes:
    """Seconds of steps by their lines, on average over those of about one size."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[float, float]] = {}
        """Size class -> lines and seconds."""

    def measure(self, num_lines: int, seconds: float, expected: float | None = None) -> None:
        size = _size_class(num_lines)
        if size not in self._sizes:
            if expected is not None:
                seconds = min(seconds, FIRST_SURPRISE * expected)
            self._sizes[size] = (num_lines, seconds)
            return
        lines, usual = self._sizes[size]
        seconds = min(seconds, MAX_SURPRISE * usual)
        self._sizes[size] = (
            lines + SMOOTHING * (num_lines - lines),
            usual + SMOOTHING * (seconds - usual),
        )

    def __len__(self) -> int:
        return len(self._sizes)

    def knows(self, num_lines: int) -> bool:
        """Whether a step of about so many lines was measured."""
        lines, _ = self.points()
        return bool((np.maximum(lines / num_lines, num_lines / lines) < KNOWN_RATIO).any())

    def points(self) -> tuple[FloatArray, FloatArray]:
        """Lines and seconds of each size, the smallest first."""
        lines, seconds = np.array(sorted(self._sizes.values())).reshape(-1, 2).T
        return lines, seconds


class StepCosts:
    """Seconds of steps without prompts: of those that verify drafts apart from others of as many
    lines, since they are computed in other ways."""

    def __init__(self) -> None:
        self._planned: deque[tuple[int, float, int, int, int, int]] = deque()
        self._last_applied = float("-inf")
        self._plain, self._drafted, self._passes = StepTimes(), StepTimes(), StepTimes()
        """Of the last, what passes of a draft model add, by the rows that it drafts for."""
        self._reading_s: float | None = None
        """What a draft model takes for a token that it makes up for."""
        self._of_model = 0, 0

    def passes_planned(self, num_drafting: int, made_up: int) -> None:
        """Behind the step that is planned next a model drafts for so many rows, and makes up for so
        many tokens before."""
        self._of_model = num_drafting, made_up

    def planned(self, plan: StepPlan, now: float) -> None:
        is_measured = bool((plan.num_new_tokens == plan.num_samples).all())
        num_lines = plan.num_tokens if is_measured else 0
        self._planned.append((plan.step, now, len(plan.rows), num_lines, *self._of_model))

    def applied(self, step: int, now: float) -> None:
        """A step's result is there; steps that failed before it never had one."""
        while self._planned and self._planned[0][0] < step:
            self._planned.popleft()
        if self._planned and self._planned[0][0] == step:
            _, planned_at, num_rows, num_lines, *of_model = self._planned.popleft()
            if num_lines:
                # A step launched ahead begins when the one before it ends.
                seconds = max(now - max(planned_at, self._last_applied), 1e-6)
                seconds = self._without_model(num_rows, num_lines, seconds, *of_model)
                if seconds:
                    self._measure(num_rows, num_lines, seconds)
        self._last_applied = now

    def _without_model(
        self, num_rows: int, num_lines: int, seconds: float, num_drafting: int, made_up: int
    ) -> float:
        """What is left of a step's seconds if a draft model's are known; 0 where these are learned
        from them."""
        num_drafts = num_lines - num_rows
        if num_drafting and (made_up or not num_drafts):
            beyond = self.drafted(num_rows, num_drafts)[-1] if num_drafts else self.plain(num_rows)
            seconds = max(seconds - beyond, 1e-6)
            if not made_up:
                self._passes.measure(num_drafting, seconds)
            elif self.knows_passes(num_drafting):
                found = max(seconds - self.passes(num_drafting), 0.0) / made_up
                usual = found if self._reading_s is None else self._reading_s
                self._reading_s = usual + READING_SMOOTHING * (found - usual)
            return 0.0
        if num_drafting and not self.knows_passes(num_drafting):
            return 0.0
        return max(seconds - self.passes(num_drafting), 1e-6) if num_drafting else seconds

    def _measure(self, num_rows: int, num_lines: int, seconds: float) -> None:
        if num_lines > num_rows:
            expected = float(self.drafted(num_rows, num_lines - num_rows)[-1])
            self._drafted.measure(num_lines, seconds, expected)
        else:
            self._plain.measure(num_lines, seconds)

    def knows_plain(self, num_rows: int) -> bool:
        """Whether a step of about so many rows without drafts was measured."""
        return self._plain.knows(num_rows)

    def knows_passes(self, num_drafting: int) -> bool:
        """Whether passes for about so many rows were measured."""
        return self._passes.knows(num_drafting)

    def passes(self, num_drafting: int) -> float:
        """Expected of passes for so many rows."""
        sizes, seconds = self._passes.points()
        return float(np.interp(num_drafting, sizes, seconds)) if len(sizes) else 0.0

    def reading(self, num_tokens: int) -> float:
        """Expected of a draft model that computes so many known tokens."""
        each = self._reading_s
        return num_tokens * (UNMEASURED_READING * self.passes(1) if each is None else each)

    def plain(self, num_lines: int) -> float:
        """Expected of a step of so many rows without drafts."""
        return float(self._plain_at(np.array([num_lines]))[0])

    def drafted(self, num_rows: int, num_drafts: int) -> FloatArray:
        """Expected of steps of so many rows with 1 and up to `num_drafts` drafts: from the sizes
        that were measured around them; far beyond these they grow as plain steps do."""
        num_lines = num_rows + np.arange(1, num_drafts + 1)
        lines, seconds = self._drafted.points()
        if not (len(lines) and self._plain):
            return self._plain_at(num_lines)
        beyond = lines > num_rows
        lines = np.append(num_rows, lines[beyond])
        # No step is quicker than one with fewer lines.
        seconds = np.maximum.accumulate(np.append(self.plain(num_rows), seconds[beyond]))
        near = np.minimum(num_lines, KNOWN_RATIO * lines[-1] if len(lines) > 1 else num_rows)
        slope = (seconds[-1] - seconds[0]) / max(lines[-1] - lines[0], 1.0)
        found = np.interp(num_lines, lines, seconds) + slope * np.maximum(near - lines[-1], 0.0)
        return np.asarray(found + self._plain_at(num_lines) - self._plain_at(near), np.float64)

    def _plain_at(self, num_lines: NDArray[Any]) -> FloatArray:
        """From the sizes that were measured around these."""
        lines, seconds = (self._plain or self._drafted).points()
        if not len(lines):
            return np.asarray(1.0 + UNMEASURED_SLOPE * num_lines, np.float64)
        seconds = np.maximum.accumulate(seconds)
        found = np.interp(num_lines, lines, seconds)
        if len(lines) > 1:
            slope = (seconds[-1] - seconds[0]) / max(lines[-1] - lines[0], 1.0)
        else:
            slope = UNMEASURED_SLOPE * seconds[0] / max(lines[0], 1.0)
        found += slope * np.maximum(num_lines - lines[-1], 0.0)
        found -= slope * np.maximum(lines[0] - num_lines, 0.0)
        return np.asarray(np.maximum(found, 0.1 * seconds[0]), np.float64)


def _size_class(num_lines: int) -> int:
    if num_lines <= SMALL:
        return num_lines
    return SMALL + int(PER_OCTAVE * np.log2(num_lines / SMALL))
