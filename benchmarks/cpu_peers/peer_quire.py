"""Quire, for `worker.py`."""

from __future__ import annotations

from typing import Any

IMPORTS_TORCH = True


class Peer:
    def __init__(self, options: dict[str, Any]) -> None:
        import quire

        self.version = quire.__version__
        self._quire = quire
        self._llm = quire.LLM(
            options["model"],
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_num_seqs"],
            **options["engine"],
        )

    def generate(self, requests: list[tuple[list[int], int]]) -> list[list[int]]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": ids} for ids, _ in requests],
            [
                self._quire.SamplingParams(
                    temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False
                )
                for _, count in requests
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget(self) -> None:
        self._llm.reset_prefix_cache()
