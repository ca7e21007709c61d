"""Beam search: a group of sequences that share blocks and compete by cumulative log-probability.

Each member is an ordinary request whose next token the host chooses. Members report their most
likely continuations; when all have, the best `width` become the next members. The first
continuation of a member takes over its row, further ones are forks that share its full blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from quire.protocol.output import Beam, FinishedSequence
from quire.protocol.plan import Float32Array, Int32Array, LogprobArrays
from quire.scheduler.request import Request, Status

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


@dataclass(slots=True)
class Candidate:
    member: Request
    token: int
    logprob: float
    """Cumulative, this token included."""


class BeamGroup:
    def __init__(self, leader: Request, width: int, length_penalty: float) -> None:
        self.leader = leader
        self.width = width
        self.num_candidates = 2 * width
        self.length_penalty = length_penalty
        self.members: dict[Request, float] = {leader: 0.0}
        """Live hypotheses and their cumulative log-probabilities."""
        self._reports: dict[Request, tuple[Int32Array, Float32Array]] = {}
        self._ended: list[Beam] = []

    def awaits(self, member: Request) -> bool:
        """Whether the member still has to compute before the group can move on."""
        return member not in self._reports

    @property
    def complete(self) -> bool:
        return len(self._reports) == len(self.members)

    def report(self, member: Request, token_ids: Int32Array, logprobs: Float32Array) -> None:
        if member in self.members:
            self._reports[member] = (token_ids, logprobs)

    def advance(self, scheduler: Scheduler) -> None:
        """Choose the next members from all reports."""
        candidates = self._candidates()
        best = sorted(candidates, key=lambda c: -c.logprob)[: self.width]
        continued: dict[Request, list[Candidate]] = {}
        for candidate in best:
            continued.setdefault(candidate.member, []).append(candidate)
        losers = [m for m in self.members if m not in continued]
        self._reports = {}
        self.members = {}
        for member, (first, *others) in continued.items():
            known = member.token_ids
            for other in others:
                fork = self._fork(scheduler, member, known, other.token)
                self.members[fork] = other.logprob
            self._extend(scheduler, member, first.token)
            self.members[member] = first.logprob
        for loser in losers:
            scheduler.drop(loser)
        if not self.members or len(best[0].member.token_ids) >= self.leader.max_total:
            self.end(scheduler, "length" if self.members else "stop")

    def _candidates(self) -> list[Candidate]:
        """Continuations of all members; those that an end-of-sequence token ends are set aside."""
        stops = set(self.leader.stop_ids)
        candidates = []
        for member, (token_ids, logprobs) in self._reports.items():
            base = self.members[member]
            for token, logprob in zip(token_ids.tolist(), logprobs.tolist(), strict=True):
                if token in stops:
                    tokens = [*member.token_ids[self.leader.num_prompt :].tolist(), token]
                    self._ended.append(self._beam(tokens, base + logprob, by_eos=True))
                elif token >= 0:
                    candidates.append(Candidate(member, token, base + logprob))
        return candidates

    def _fork(
        self, scheduler: Scheduler, member: Request, known: Int32Array, token: int
    ) -> Request:
        fork = replace(
            self.leader,
            held_token_ids=np.append(known, np.int32(token)),
            row=-1,
            status=Status.WAITING,
            parent=member,
            num_shared=len(known),
        )
        scheduler.waiting.push(fork)
        return fork

    def _extend(self, scheduler: Scheduler, member: Request, token: int) -> None:
        if member.row >= 0:
            scheduler.append_tokens(member, [token])
        else:
            member.held_token_ids = np.append(member.held_token_ids, np.int32(token))
            scheduler.waiting.push(member)

    def _beam(self, tokens: list[int], logprob: float, by_eos: bool) -> Beam:
        """Score by cumulative log-probability over length (prompt included, EOS not)."""
        length = self.leader.num_prompt + len(tokens) - by_eos
        return Beam(tokens, logprob, logprob / length**self.length_penalty, by_eos)

    def end(self, scheduler: Scheduler, reason: str, error: str = "") -> FinishedSequence:
        """Give the group its one terminal output and free all members."""
        for member, logprob in self.members.items():
            tokens = member.token_ids[self.leader.num_prompt :].tolist()
            self._ended.append(self._beam(tokens, logprob, by_eos=False))
            scheduler.drop(member)
        self.members = {}
        best = sorted(self._ended, key=lambda beam: -beam.score)[: self.width]
        tokens = np.array(best[0].token_ids if best else [], np.int32)
        ended = scheduler.finish(self.leader, tokens, reason, error=error)
        ended.beams = best
        return ended


def report_candidates(
    members: list[Request], samples: Int32Array, logprobs: LogprobArrays | None
) -> list[BeamGroup]:
    """Hand a step's candidates to the members' groups; returns the groups that can move on."""
    assert logprobs is not None
    groups: dict[int, BeamGroup] = {}
    for member, sample in zip(members, samples, strict=True):
        assert member.group is not None
        line = int(np.flatnonzero(logprobs.index == sample)[0])
        member.group.report(member, logprobs.token_ids[line, 1:], logprobs.logprobs[line, 1:])
        groups[id(member.group)] = member.group
    return [group for group in groups.values() if group.complete]
