"""vLLM on a CPU, for `worker.py`."""

from __future__ import annotations

import os
from typing import Any

IMPORTS_TORCH = True


class Peer:
    def __init__(self, options: dict[str, Any]) -> None:
        # Left to itself it keeps one core idle.
        cores = ",".join(map(str, options["cores"]))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        import vllm

        self.version = vllm.__version__
        self._vllm = vllm
        self._llm = vllm.LLM(
            model=options["model"],
            dtype="float32",
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_num_seqs"],
            enable_prefix_caching=True,
            enforce_eager=True,
        )

    def generate(self, requests: list[tuple[list[int], int]]) -> list[list[int]]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": ids} for ids, _ in requests],
            [
                self._vllm.SamplingParams(
                    temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False
                )
                for _, count in requests
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget(self) -> None:
        self._llm.reset_prefix_cache()
