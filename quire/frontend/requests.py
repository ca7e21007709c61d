"""The requests of one call of `LLM`, checked one by one as they are taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.engine.core import EngineCore
from quire.engine.structured_output.compiler import Compilation
from quire.frontend.inputs import Prompt, TokenizationOptions, naming_index
from quire.frontend.session import Session
from quire.protocol.errors import RequestError
from quire.protocol.request import NewRequest
from quire.protocol.sampling import BeamSearchParams, SamplingParams

COMPILED_AHEAD = 64


def checked_requests(
    session: Session,
    core: EngineCore,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    priority: Sequence[int] | None,
    options: TokenizationOptions,
    *,
    streams: bool = False,
    pooling: str | None = None,
) -> Iterator[NewRequest]:
    """One for each prompt, whose text is tokenised already; raises at the first that is bad."""
    if priority is not None and len(priority) != len(prompts):
        raise RequestError(
            f"priority has {len(priority)} entries for {len(prompts)} prompts; give one each."
        )
    inputs = session.inputs
    now = core.clock()
    prepared: dict[int, SamplingParams] = {}
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        with naming_index(i):
            inputs.check_prompt(prompt, options)
            if id(one) not in prepared:
                prepared[id(one)] = inputs.prepare_params(one)
            key = session.take_keys(one.n)
            new = inputs.new_request(
                key,
                str(key),
                prompt,
                prepared[id(one)],
                arrival_time=now,
                priority=priority[i] if priority is not None else 0,
                streams=streams,
                pooling=pooling,
            )
            core.check(new)
        yield new


def beam_requests(
    session: Session, core: EngineCore, prompts: Sequence[Prompt], params: BeamSearchParams
) -> Iterator[NewRequest]:
    """One search for each prompt, whose text is tokenised already."""
    for i, prompt in enumerate(prompts):
        with naming_index(i):
            key, now = session.take_keys(1), core.clock()
            new = session.inputs.new_request(
                key, str(key), prompt, params.sampling(), arrival_time=now, beams=params
            )
            core.check(new)
        yield new


def compiled(core: EngineCore, news: Sequence[NewRequest]) -> list[Compilation | None]:
    """The forms of requests, ready; raises if one cannot be enforced. They are kept here, for the
    compiler itself forgets the oldest, and takes no more at once than it keeps."""
    made: list[Compilation | None] = []

    def wait_for(index: int) -> None:
        compilation = made[index]
        if compilation is not None:
            with naming_index(index):
                compilation.result()

    try:
        for i, new in enumerate(news):
            if i >= COMPILED_AHEAD:
                wait_for(i - COMPILED_AHEAD)
            with naming_index(i):
                made.append(core.grammars.compile(new))
        for i in range(max(len(made) - COMPILED_AHEAD, 0), len(made)):
            wait_for(i)
    except BaseException:  # also Ctrl-C: the others are not wanted any more
        for compilation in made:
            if compilation is not None:
                compilation.cancel()
        raise
    return made
