"""Quire: an LLM inference engine with a paged KV cache. Public names load when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.config.engine_args import AsyncEngineArgs, EngineArgs
    from quire.config.options import EngineOptions
    from quire.frontend.async_llm import AsyncLLM, AsyncLLMEngine
    from quire.frontend.llm import LLM, LLMEngine
    from quire.frontend.outputs import (
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
    )
    from quire.frontend.pooling import PoolingParams
    from quire.inputs import PromptType, TextPrompt, TokensPrompt
    from quire.protocol.errors import (
        EngineDeadError,
        ModelError,
        OptionError,
        OverloadedError,
        QuireError,
        RequestError,
    )
    from quire.protocol.sampling import (
        BeamSearchParams,
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
    )
    from quire.protocol.structured import StructuredOutputs, StructuredOutputsParams

from quire.protocol import __version__

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineDeadError",
    "EngineOptions",
    "LLMEngine",
    "Logprob",
    "ModelError",
    "OptionError",
    "OverloadedError",
    "PoolingParams",
    "PromptType",
    "QuireError",
    "RepetitionDetectionParams",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOMES = {
    "LLM": "quire.frontend.llm",
    "AsyncEngineArgs": "quire.config.engine_args",
    "AsyncLLM": "quire.frontend.async_llm",
    "AsyncLLMEngine": "quire.frontend.async_llm",
    "BeamSearchParams": "quire.protocol.sampling",
    "CompletionOutput": "quire.frontend.outputs",
    "EmbeddingRequestOutput": "quire.frontend.outputs",
    "EngineArgs": "quire.config.engine_args",
    "EngineDeadError": "quire.protocol.errors",
    "EngineOptions": "quire.config.options",
    "LLMEngine": "quire.frontend.llm",
    "Logprob": "quire.frontend.outputs",
    "ModelError": "quire.protocol.errors",
    "OptionError": "quire.protocol.errors",
    "OverloadedError": "quire.protocol.errors",
    "PoolingParams": "quire.frontend.pooling",
    "PromptType": "quire.inputs",
    "QuireError": "quire.protocol.errors",
    "RepetitionDetectionParams": "quire.protocol.sampling",
    "RequestError": "quire.protocol.errors",
    "RequestOutput": "quire.frontend.outputs",
    "RequestOutputKind": "quire.protocol.sampling",
    "SamplingParams": "quire.protocol.sampling",
    "StructuredOutputs": "quire.protocol.structured",
    "StructuredOutputsParams": "quire.protocol.structured",
    "TextPrompt": "quire.inputs",
    "TokensPrompt": "quire.inputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
