"""OpenVINO GenAI's continuous batching, for `worker.py`."""

from __future__ import annotations

import importlib.metadata
from typing import Any

IMPORTS_TORCH = False
CACHE_GB = 2


class Peer:
    def __init__(self, options: dict[str, Any]) -> None:
        import numpy
        import openvino
        import openvino_genai

        self.version = importlib.metadata.version("openvino-genai")
        self._numpy, self._openvino, self._genai = numpy, openvino, openvino_genai
        settings = openvino_genai.SchedulerConfig()
        settings.cache_size = CACHE_GB
        settings.max_num_seqs = options["max_num_seqs"]
        settings.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options["model"],
            settings,
            "CPU",
            {"INFERENCE_NUM_THREADS": options["threads"]},
        )

    def generate(self, requests: list[tuple[list[int], int]]) -> list[list[int]]:
        results = self._pipeline.generate(
            [
                self._openvino.Tensor(self._numpy.array([ids], dtype=self._numpy.int64))
                for ids, _ in requests
            ],
            [self._greedy(count) for _, count in requests],
        )
        return [list(result.m_generation_ids[0]) for result in results]

    def _greedy(self, num_tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        return config

    def forget(self) -> None:
        """It has no way to; prompts of each round differ in their first token instead."""
