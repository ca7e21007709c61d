"""A progress bar over prompts with token rates."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from quire.frontend.output_processor import OpenRequest


class ProgressBar:
    """tqdm over prompts; silent where it is not wanted, or tqdm is not installed."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._bar: Any = None
        self._started = time.perf_counter()
        self._num_in = self._num_out = 0
        if enabled:
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self._bar = tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)

    def add(self, request: OpenRequest) -> None:
        """Count a finished request."""
        self._num_in += len(request.prompt_token_ids)
        self._num_out += sum(len(sequence.token_ids) for sequence in request.sequences)
        if self._bar is not None:
            elapsed = max(time.perf_counter() - self._started, 1e-9)
            self._bar.set_postfix_str(
                f"input: {self._num_in / elapsed:.1f} tok/s, "
                f"output: {self._num_out / elapsed:.1f} tok/s",
                refresh=False,
            )
        self.update(1)

    def update(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
