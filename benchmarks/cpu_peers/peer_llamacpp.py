"""llama.cpp's server through xllamacpp, for `worker.py`."""

from __future__ import annotations

import importlib.metadata
from concurrent.futures import ThreadPoolExecutor
from typing import Any

IMPORTS_TORCH = False


class Peer:
    def __init__(self, options: dict[str, Any]) -> None:
        import xllamacpp

        self.version = importlib.metadata.version("xllamacpp")
        slots = options["max_num_seqs"]
        params = xllamacpp.CommonParams()
        params.model.path = options["model"]
        params.n_parallel = slots
        params.n_ctx = slots * options["max_model_len"]
        params.cpuparams.n_threads = options["threads"]
        params.cpuparams_batch.n_threads = options["threads"]
        params.verbosity = 0
        self._server = xllamacpp.Server(params)
        self._threads = ThreadPoolExecutor(slots)

    def generate(self, requests: list[tuple[list[int], int]]) -> list[int]:
        return list(self._threads.map(self._complete, requests))

    def _complete(self, request: tuple[list[int], int]) -> int:
        ids, count = request
        answer = self._server.handle_completions(
            {"prompt": ids, "n_predict": count, "ignore_eos": True, "temperature": 0.0}
        )
        if "usage" not in answer:
            raise RuntimeError(f"llama.cpp answered {answer}")
        return int(answer["usage"]["completion_tokens"])

    def forget(self) -> None:
        """It has no way to; prompts of each round differ in their first token instead."""
