"""The sampling classes under the module name that vLLM scripts import them from."""

from quire.protocol.sampling import (
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from quire.protocol.structured import StructuredOutputs, StructuredOutputsParams
from quire.protocol.structured import guided_decoding_params as GuidedDecodingParams

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
]
