"""Errors a user can see. Each message names the field or setting, its value, and the remedy."""

from __future__ import annotations


class QuireError(ValueError):
    """Root of all errors that Quire raises on purpose."""


class OptionError(QuireError):
    """An engine option is unknown, out of range, or cannot be combined with another."""


class ModelError(QuireError):
    """A model cannot be found, read, or is of an unsupported kind."""


class RequestError(QuireError):
    """A request is malformed or can never be served (HTTP 400)."""


class AdapterError(RequestError):
    """An adapter cannot be found or read, or does not fit the model (HTTP 400)."""


class ContextLengthError(RequestError):
    """A prompt, or a prompt and the completion that is asked for, is longer than the context. Its
    words are those that clients of OpenAI's protocol look for."""

    def __init__(
        self,
        max_model_len: int,
        prompt_tokens: int,
        completion_tokens: int = 1,
        field: str = "prompt",
        *,
        is_bound: bool = False,
    ) -> None:
        """`field` is the one to change: the prompt's, or that of the completion's length;
        `is_bound`: the prompt, which was not tokenised, has at least so many tokens."""
        asked = "at least 1" if field == "prompt" else str(completion_tokens)
        total = prompt_tokens + completion_tokens
        remedy = (
            "Shorten the prompt, or start the engine with a larger max_model_len."
            if field == "prompt"
            else f"Lower {field} or shorten the prompt."
        )
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {'at least ' if is_bound else ''}{total} tokens ({prompt_tokens} in the "
            f"prompt, {asked} in the completion). {remedy}"
        )
        self.max_model_len = max_model_len
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens
        self.field = field


class OverloadedError(QuireError):
    """The engine cannot take more requests now (HTTP 503 with Retry-After)."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(QuireError):
    """A request's time was over before its first token (HTTP 408)."""


class StepMemoryError(QuireError):
    """A step needed more memory than there was. The engine lives on and tries a smaller step,
    unless the device `is_exhausted`, so that no step could run."""

    def __init__(self, message: str, *, is_exhausted: bool = False) -> None:
        super().__init__(message)
        self.is_exhausted = is_exhausted


class EngineDeadError(QuireError):
    """The engine stopped on an internal failure and serves nothing any more (HTTP 503)."""


class RankMissing(EngineDeadError, TimeoutError):
    """A rank did not come to the others, or take part in what they do together, in time."""


class ServerError(QuireError):
    """A server that this program is a client of does not answer, or failed."""
