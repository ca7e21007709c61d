"""Compiling many kernels at once, for a start with an empty kernel cache."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from triton import AsyncCompileMode


class _NotLaunched:
    """Stands for a kernel that is being compiled; launching it does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *arguments: Any) -> None:
        pass

    def run(self, *arguments: Any) -> None:
        pass


class CompilingTogether(AsyncCompileMode):
    """Inside, launches of kernels that are not compiled yet only have them compiled, side by side;
    at the end all of them are ready. What the launches would have computed is undefined.

    A kernel that does not compile says so when it is really launched.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "compile")
        self._jobs: dict[str, Future[Any]] = {}
        self._waiting: list[tuple[str, _NotLaunched, tuple[Callable[..., None], ...]]] = []
        super().__init__(self._pool)

    def submit(
        self, key: str, compile_kernel: Callable[[], Any], *callbacks: Callable[..., None]
    ) -> _NotLaunched:
        """`callbacks` are what takes the kernel in and, in newer versions, what forgets it."""
        if key not in self._jobs:
            self._jobs[key] = self._pool.submit(compile_kernel)
        # Older versions ask for the same kernel again, which is then taken in as often.
        stand_in = _NotLaunched()
        self._waiting.append((key, stand_in, callbacks))
        return stand_in

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        for key, stand_in, (take_in, *forget) in self._waiting:
            future = self._jobs[key]
            if future.exception() is None:
                take_in(future.result())
            else:
                for drop in forget:
                    drop(stand_in)
        self._pool.shutdown()
