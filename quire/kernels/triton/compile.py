"""Compiling many kernels at once, for a start with an empty kernel cache."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import KernelInterface


class _InTheMaking:
    """Stands for a kernel that is being compiled."""


def _compile_only(kernel: KernelInterface[Any], grid: Any) -> Callable[..., None]:
    """In place of `kernel[grid]`. Nothing may be launched: a kernel that was compiled earlier would
    take for addresses what one that is not would have computed."""

    def launch(*arguments: Any, **options: Any) -> None:
        kernel.run(*arguments, grid=grid, warmup=True, **options)

    return launch


class CompilingTogether(AsyncCompileMode):
    """Inside, launches only have kernels compiled, side by side, where they are not yet; at the end
    all of them are ready. What the launches would have computed is undefined.

    A kernel that does not compile says so when it is really launched.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "compile")
        self._jobs: dict[str, Future[Any]] = {}
        self._waiting: list[tuple[str, _InTheMaking, tuple[Callable[..., None], ...]]] = []
        self._launch = KernelInterface.__getitem__
        super().__init__(self._pool)

    def submit(
        self, key: str, compile_kernel: Callable[[], Any], *callbacks: Callable[..., None]
    ) -> _InTheMaking:
        """`callbacks` are what takes the kernel in and, in newer versions, what forgets it."""
        if key not in self._jobs:
            self._jobs[key] = self._pool.submit(compile_kernel)
        # Older versions ask for the same kernel again, which is then taken in as often.
        stand_in = _InTheMaking()
        self._waiting.append((key, stand_in, callbacks))
        return stand_in

    def __enter__(self) -> CompilingTogether:
        KernelInterface.__getitem__ = _compile_only  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        KernelInterface.__getitem__ = self._launch  # type: ignore[method-assign]
        super().__exit__(kind, error, trace)
        for key, stand_in, (take_in, *forget) in self._waiting:
            future = self._jobs[key]
            if future.exception() is None:
                take_in(future.result())
            else:
                for drop in forget:
                    drop(stand_in)
        self._pool.shutdown()
