"""Beam search: a group of sequences that share blocks and compete by cumulative log-probability.

Each member is an ordinary sequence whose next token the host chooses. Members report their most
likely continuations; when all have, the best `width` become the next members. The first
continuation of a member takes over its row, further ones are forks that share its full blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from quire.protocol.output import Beam
from quire.protocol.plan import Float32Array, Int32Array
from quire.scheduler.sequence import Sequence, Status


@dataclass(slots=True)
class Candidate:
    member: Sequence
    token: int
    logprob: float
    """Cumulative, this token included."""


@dataclass(slots=True)
class BeamMoves:
    """What becomes of a group's members."""

    extended: list[tuple[Sequence, int]] = field(default_factory=list)
    """Members that go on, with their next tokens."""
    forks: list[Sequence] = field(default_factory=list)
    """New members, to be queued."""
    losers: list[Sequence] = field(default_factory=list)
    """Members that are no longer among the best."""


class BeamGroup:
    def __init__(self, leader: Sequence) -> None:
        self.leader = leader
        self._width = leader.new.beam_width
        self._length_penalty = leader.new.length_penalty
        self.members: dict[Sequence, float] = {leader: 0.0}
        """Live hypotheses and their cumulative log-probabilities."""
        self._reports: dict[Sequence, tuple[Int32Array, Float32Array]] = {}
        self._ended: list[Beam] = []

    def awaits(self, member: Sequence) -> bool:
        """Whether the member still has to compute before the group can move on."""
        return member not in self._reports

    @property
    def complete(self) -> bool:
        return len(self._reports) == len(self.members)

    def report(self, member: Sequence, token_ids: Int32Array, logprobs: Float32Array) -> None:
        if member in self.members:
            self._reports[member] = (token_ids, logprobs)

    def advance(self) -> BeamMoves:
        """Choose the next members from all reports."""
        best = sorted(self._candidates(), key=lambda c: -c.logprob)[: self._width]
        continued: dict[Sequence, list[Candidate]] = {}
        for candidate in best:
            continued.setdefault(candidate.member, []).append(candidate)
        moves = BeamMoves(losers=[m for m in self.members if m not in continued])
        self._reports, self.members = {}, {}
        for member, (first, *others) in continued.items():
            for other in others:
                fork = self._fork(member, other.token)
                self.members[fork] = other.logprob
                moves.forks.append(fork)
            self.members[member] = first.logprob
            moves.extended.append((member, first.token))
        return moves

    @property
    def is_full(self) -> bool:
        """Whether its members, which are equally long, have all the tokens they may have."""
        return any(member.num_known >= self.leader.max_total for member in self.members)

    def _candidates(self) -> list[Candidate]:
        """Continuations of all members; those that an end-of-sequence token ends are set aside."""
        stops = set(self.leader.stop_ids)
        candidates = []
        for member, (token_ids, logprobs) in self._reports.items():
            base = self.members[member]
            for token, logprob in zip(token_ids.tolist(), logprobs.tolist(), strict=True):
                if token in stops:
                    tokens = [*self._generated(member), token]
                    self._ended.append(self._beam(tokens, base + logprob, by_eos=True))
                elif token >= 0:
                    candidates.append(Candidate(member, token, base + logprob))
        return candidates

    def _fork(self, member: Sequence, token: int) -> Sequence:
        known = member.token_ids
        return replace(
            self.leader,
            held_token_ids=np.append(known, np.int32(token)),
            row=-1,
            status=Status.WAITING,
            parent=member,
            num_shared=len(known),
        )

    def _generated(self, member: Sequence) -> list[int]:
        tokens: list[int] = member.token_ids[self.leader.num_prompt :].tolist()
        return tokens

    def _beam(self, tokens: list[int], logprob: float, by_eos: bool) -> Beam:
        """Score by cumulative log-probability over length (prompt included, EOS not)."""
        length = self.leader.num_prompt + len(tokens) - by_eos
        return Beam(tokens, logprob, logprob / length**self._length_penalty, by_eos)

    def finish(self) -> list[Beam]:
        """The best hypotheses, live members included."""
        for member, logprob in self.members.items():
            self._ended.append(self._beam(self._generated(member), logprob, by_eos=False))
        return sorted(self._ended, key=lambda beam: -beam.score)[: self._width]
