"""The requests of one call of `LLM`, checked one by one as they are taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.engine.core import EngineCore
from quire.frontend.inputs import Prompt, TokenizationOptions, naming_index
from quire.frontend.session import Session
from quire.protocol.request import NewRequest
from quire.protocol.sampling import SamplingParams


def checked_requests(
    session: Session,
    core: EngineCore,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    priority: Sequence[int] | None,
    options: TokenizationOptions,
    streams: bool,
) -> Iterator[NewRequest]:
    """One for each prompt, whose text is tokenised already; raises at the first that is bad."""
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
            )
            core.check(new)
        yield new


def enforceable(core: EngineCore, news: Sequence[NewRequest]) -> Sequence[NewRequest]:
    """The same requests, once all their forms are compiled; raises if one cannot be enforced."""
    compilations = []
    for i, new in enumerate(news):
        with naming_index(i):
            compilations.append(core.grammars.compile(new))
    for i, compilation in enumerate(compilations):
        if compilation is not None:
            with naming_index(i):
                compilation.result()
    return news
