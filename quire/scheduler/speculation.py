"""`Speculation`: how many drafts each row verifies in a step."""

from __future__ import annotations

import numpy as np

from quire.protocol.plan import Int32Array
from quire.scheduler.sequence import Columns


class Speculation:
    """Every row that may gets the same number of drafts; 0 is plain decoding."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self.num_drafts = 0
        """Most drafts of a row; the workers have a drafter that proposes as many."""

    def drafts(self, rows: Int32Array) -> Int32Array:
        """Drafts that each of `rows` may verify once it has computed its known tokens.

        The device proposes them after a row's first sample. Tokens are counted at their upper
        bound, so that none can lie beyond the row's end. Where the host needs a token before the
        next one is sampled (beams, grammars), there are none.
        """
        c = self._columns
        may = c.has_sampled[rows] & ~c.synchronous[rows] & ~c.constrained[rows]
        room = c.max_total[rows] - c.num_tokens[rows] - 1
        return np.where(may, np.clip(room, 0, self.num_drafts), 0).astype(np.int32)
