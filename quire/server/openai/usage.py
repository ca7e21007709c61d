"""Token counts of a reply, kept as outputs come."""

from __future__ import annotations

from typing import Any

from quire.frontend.outputs import RequestOutput


class Usage:
    """Counts over all prompts and completions of one reply; deltas or whole outputs alike."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self.completion_tokens = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Take in an output of the prompt with this index that was not taken in before."""
        self._prompts[index] = len(output.prompt_token_ids)
        self._cached[index] = output.num_cached_tokens or 0
        self.completion_tokens += sum(len(one.token_ids) for one in output.outputs)

    def record(self) -> dict[str, Any]:
        prompt = sum(self._prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
