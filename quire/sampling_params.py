"""The sampling classes under the module name that vLLM scripts import them from."""

from quire.protocol.sampling import (
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)

__all__ = ["BeamSearchParams", "RepetitionDetectionParams", "RequestOutputKind", "SamplingParams"]
