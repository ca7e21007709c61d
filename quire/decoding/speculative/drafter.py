"""`Drafter`: proposes tokens that may follow those of a row."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.protocol.plan import StepPlan


class Drafter(Protocol):
    """Is asked after each step for drafts of the rows that sampled; no call waits for the device. A
    draft may be any token: verification keeps none that plain decoding would not sample.
    """

    def settle(self, plan: StepPlan) -> None:
        """Rows will come, go and be cut back as a plan says; those that there are still stand."""

    def update(self, plan: StepPlan) -> None:
        """They have come and gone; the plan's step is about to be carried out."""

    def accepted(self, rows: Tensor, counts: Tensor | None) -> None:
        """Row `rows[i]` took in `counts[i]` tokens (int32), each of them one where there are no
        counts; they are in the table already. Asked after each step, also where no row sampled."""

    def propose(self, rows: Tensor) -> Tensor:
        """Drafts for each of `rows`: token ids, int32 [R, k], with negative ones behind the last
        draft of a row."""
