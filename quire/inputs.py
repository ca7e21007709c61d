"""The types of prompts, under the module name that vLLM's scripts import them from."""

from __future__ import annotations

from typing import TypeAlias, TypedDict


class _PromptOptions(TypedDict, total=False):
    cache_salt: str
    """Prompts with different salts share no cached blocks."""


class _Text(TypedDict):
    prompt: str


class _Tokens(TypedDict):
    prompt_token_ids: list[int]


class TextPrompt(_Text, _PromptOptions):
    """A prompt as text."""


class TokensPrompt(_Tokens, _PromptOptions, total=False):
    """A prompt as token ids; `prompt` is shown in outputs, and not read."""

    prompt: str


PromptType: TypeAlias = str | list[int] | TextPrompt | TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
