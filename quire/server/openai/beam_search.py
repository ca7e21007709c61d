"""Beam search over HTTP, as vLLM has it: `use_beam_search` with `n` as the number of beams."""

from __future__ import annotations

import dataclasses

from quire.frontend.inputs import Prompt
from quire.protocol.errors import RequestError
from quire.protocol.sampling import BeamSearchParams, SamplingParams
from quire.server.openai.bodies import ChoicesBody
from quire.server.preparation.prepare import Preparation

USED = frozenset(
    {
        *("n", "max_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
        *("temperature", "seed", "output_kind"),  # beams are not drawn, and end all at once
    }
)
"""Sampling parameters that a search follows, or that cannot change what it finds."""


def beam_search_params(
    state: Preparation, body: ChoicesBody, params: SamplingParams, prompts: list[Prompt]
) -> BeamSearchParams:
    """The search that a body asks for; `params` are its sampling parameters."""
    plain = SamplingParams()
    for item in dataclasses.fields(params):
        name = item.name
        if name not in USED and getattr(params, name) != getattr(plain, name):
            raise RequestError(
                f"{name}={getattr(params, name)!r} is not supported in beam search; leave {name} "
                "or use_beam_search out."
            )
    limit = state.options.scheduler.max_num_seqs
    if limit is not None and params.n > limit:
        raise RequestError(
            f"n={params.n} exceeds max_num_seqs={limit}: all beams run at once. Lower n, or start "
            "the server with a larger --max-num-seqs."
        )
    longest = max(len(prompt.token_ids) for prompt in prompts if prompt.token_ids is not None)
    room = state.inputs.max_model_len - longest
    return BeamSearchParams(
        beam_width=params.n,
        max_tokens=room if params.max_tokens is None else params.max_tokens,
        ignore_eos=params.ignore_eos,
        temperature=0.0 if body.temperature is None else body.temperature,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )
