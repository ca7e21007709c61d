"""What a beam search returns, from what the engine found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.frontend.outputs import BeamSearchOutput, BeamSearchSequence
from quire.protocol.output import Beam
from quire.protocol.sampling import SamplingParams
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.frontend.output_processor import OpenRequest


def beam_tokens(beam: Beam, params: SamplingParams) -> list[int]:
    """The tokens of a hypothesis that its caller sees."""
    drops_eos = beam.finished_by_eos and not params.include_stop_str_in_output
    return beam.token_ids[:-1] if drops_eos else beam.token_ids


def beam_output(request: OpenRequest, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """Of a search that has ended."""
    sequences = []
    for beam in request.sequences:
        assert beam.cumulative_logprob is not None
        tokens = request.prompt_token_ids + beam.token_ids
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                cum_logprob=beam.cumulative_logprob,
                text=tokenizer.decode(tokens) if tokenizer else None,
                finish_reason="stop" if beam.finish_reason == "stop" else "length",
            )
        )
    return BeamSearchOutput(sequences)
