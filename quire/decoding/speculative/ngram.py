"""`NgramDrafter`: drafts what followed when a row's last tokens occurred in it before."""

from __future__ import annotations

from torch import Tensor

from quire.kernels import dispatch
from quire.kernels.torch.ngrams import NgramSettings
from quire.protocol.plan import StepPlan


class NgramDrafter:
    """Reads the row alone: its prompt and what was generated, never another request's text."""

    def __init__(self, settings: NgramSettings, token_ids: Tensor, num_tokens: Tensor) -> None:
        """`token_ids` [rows, tokens] and `num_tokens` [rows] are those of the row table."""
        self._settings, self._token_ids, self._num_tokens = settings, token_ids, num_tokens

    def settle(self, plan: StepPlan) -> None:
        """Nothing is kept of rows."""

    def update(self, plan: StepPlan) -> None:
        """The table follows plans."""

    def accepted(self, rows: Tensor, counts: Tensor | None) -> None:
        """The table has all that is known."""

    def propose(self, rows: Tensor) -> Tensor:
        return dispatch.propose_ngrams(self._token_ids, self._num_tokens, rows, self._settings)
