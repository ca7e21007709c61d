"""What a beam search returns, from what the engine found."""

from __future__ import annotations

from quire.frontend.outputs import BeamSearchOutput, BeamSearchSequence
from quire.frontend.tokenizer import Tokenizer
from quire.protocol.output import Beam, FinishedSequence
from quire.protocol.request import NewRequest
from quire.protocol.sampling import SamplingParams


def beam_tokens(beam: Beam, params: SamplingParams) -> list[int]:
    """The tokens of a hypothesis that its caller sees."""
    drops_eos = beam.finished_by_eos and not params.include_stop_str_in_output
    return beam.token_ids[:-1] if drops_eos else beam.token_ids


def beam_output(
    ended: FinishedSequence, new: NewRequest, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    assert ended.beams is not None
    prompt = new.prompt_token_ids.tolist()
    sequences = []
    for beam in ended.beams:
        tokens = prompt + beam_tokens(beam, new.params)
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                cum_logprob=beam.cumulative_logprob,
                text=tokenizer.decode(tokens) if tokenizer else None,
                finish_reason="stop" if beam.finished_by_eos else "length",
            )
        )
    return BeamSearchOutput(sequences)
