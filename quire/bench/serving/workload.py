"""The requests of a load, as lengths; prompts are made of them when they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.bench.flags import Lengths
from quire.bench.workload import Dice
from quire.protocol.errors import OptionError


class Segment(NamedTuple):
    """A piece of a prompt. Segments with the same key begin with the same tokens."""

    key: str
    num_tokens: int


@dataclass(frozen=True)
class LoadRequest:
    segments: tuple[Segment, ...]
    num_output_tokens: int
    arrival_s: float | None = None
    """When a trace has it arrive, from the trace's start."""

    @property
    def num_input_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)


def drawn_requests(
    count: int,
    inputs: Lengths,
    outputs: Lengths,
    *,
    shared_prefix: int = 0,
    seed: int = 0,
    distribution: str = "log-uniform",
) -> list[LoadRequest]:
    """Requests of random lengths; all begin with the same `shared_prefix` tokens, which count as
    part of their input."""
    if shared_prefix >= inputs.low:
        raise OptionError(
            f"--shared-prefix-len {shared_prefix} must be below the least --input-len "
            f"({inputs.low}), which counts it."
        )
    dice = Dice(seed, 1, distribution)
    requests = []
    for index in range(count):
        length, output = dice.length(inputs), dice.length(outputs)
        own = Segment(f"request {index}", length - shared_prefix)
        prefix = (Segment("prefix", shared_prefix),) if shared_prefix else ()
        requests.append(LoadRequest((*prefix, own), output))
    return requests


def capped(
    requests: Sequence[LoadRequest], max_input: int | None, max_output: int | None
) -> list[LoadRequest]:
    """Requests cut to what a small model can take; prompts keep their beginnings."""
    return [
        replace(
            request,
            segments=_cut(request.segments, max_input),
            num_output_tokens=min(request.num_output_tokens, max_output)
            if max_output
            else request.num_output_tokens,
        )
        for request in requests
    ]


def _cut(segments: tuple[Segment, ...], most: int | None) -> tuple[Segment, ...]:
    if most is None:
        return segments
    kept = []
    for segment in segments:
        if most > 0:
            kept.append(segment._replace(num_tokens=min(segment.num_tokens, most)))
        most -= segment.num_tokens
    return tuple(kept)
