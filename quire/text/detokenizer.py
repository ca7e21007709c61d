"""`IncrementalDetokenizer`: the text of one output as its tokens come, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.protocol.plan import Int32Array

if TYPE_CHECKING:
    from quire.protocol.sampling import SamplingParams
    from quire.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one output. The work per token does not depend on how many came before.

    A stop string ends the text as soon as its last character is there; of two that end at the same
    character the longer one counts. So the result is the same however the tokens are portioned.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] | Int32Array,
        params: SamplingParams,
    ) -> None:
        self._stream = tokenizer.streams.open(prompt_token_ids, params.skip_special_tokens)
        self._stop_strings = params.stop_strings
        self._longest = max(map(len, self._stop_strings), default=0)
        self._includes_stop = params.include_stop_str_in_output
        # What may become a stop string is not shown, unless stop strings are shown anyway.
        self._hold_back = 0 if self._includes_stop else max(self._longest - 1, 0)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._settled: list[str] = []
        self._unread: list[str] = []
        """The part of the settled text that `delta` has not returned yet."""
        self._length = 0
        self._recent = ""
        """The end of the settled text: as much as a stop string can reach back."""
        self._floor = 0
        """A stop string must end after this character; set by `min_tokens`."""
        self._finished = False
        self.stop: str | None = None
        """The stop string that ended the text."""

    def append(self, token_ids: Sequence[int] | Int32Array) -> str | None:
        """Take further tokens. Returns the stop string found, if any; the text is then final."""
        if self._finished:
            return self.stop
        ids: list[int] = (
            token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
        )
        missing = self._min_tokens - self._num_tokens
        self._num_tokens += len(ids)
        if missing > 0:
            self._keep(self._stream.push(ids[:missing]))
            self._floor = self._length + len(self._stream.tail())
            ids = ids[missing:]
        if ids:
            text = self._stream.push(ids)
            self._accept(text, self._stream.tail() if self._stop_strings else "")
        return self.stop

    def finish(self) -> None:
        """No more tokens will come: all text may be shown, complete characters or not."""
        if not self._finished:
            text = self._stream.flush()
            if self._num_tokens > self._min_tokens:
                self._accept(text, "")
            else:
                self._keep(text)
            self._finished = True

    @property
    def text(self) -> str:
        """All text that may be shown."""
        self._settled = ["".join(self._settled)]
        text = self._settled[0]
        return text if self._finished else text[: max(self._length - self._hold_back, 0)]

    def delta(self, finished: bool) -> str:
        """Text that may be shown and was not in an earlier delta."""
        if finished:
            self.finish()
        text = "".join(self._unread)
        end = len(text) if self._finished else max(len(text) - self._hold_back, 0)
        self._unread = [text[end:]]
        return text[:end]

    def _accept(self, text: str, tail: str) -> None:
        """Keep new settled text, up to a stop string. `tail` may hold the rest of one."""
        found = self._find_stop(self._recent + text + tail) if text or tail else None
        self._keep(text)
        if found is None:
            return
        start, self.stop = found
        self._keep(tail)
        end = start + (len(self.stop) if self._includes_stop else 0)
        read = self._length - sum(map(len, self._unread))
        whole = "".join(self._settled)[:end]
        self._settled, self._unread = [whole], [whole[read:]]
        self._length = len(whole)
        self._finished = True

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Where the first stop string starts and which it is; `text` begins with `_recent`."""
        base = self._length - len(self._recent)
        matches = []
        for stop in self._stop_strings:
            start = text.find(stop, max(self._floor - base - len(stop) + 1, 0))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        _, start, stop = min(matches)
        return base + start, stop

    def _keep(self, text: str) -> None:
        if text:
            self._settled.append(text)
            self._unread.append(text)
            self._length += len(text)
        if self._longest > 1:
            self._recent = (self._recent + text)[-(self._longest - 1) :]
