"""`generate` of transformers over static batches, for `worker.py`."""

from __future__ import annotations

from typing import Any

IMPORTS_TORCH = True
BATCH = 8
PAD = 0


class Peer:
    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        import transformers

        self.version = transformers.__version__
        self._torch = torch
        torch.set_num_threads(options["threads"])
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            options["model"], dtype=torch.float32
        ).eval()
        # The model's own settings would fill in what is left unset here, its end token above all.
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False, use_cache=True, pad_token_id=PAD
        )

    def generate(self, requests: list[tuple[list[int], int]]) -> list[list[int]]:
        """In order of arrival; a batch lasts as long as its longest request."""
        outputs: list[list[int]] = []
        for start in range(0, len(requests), BATCH):
            outputs += self._generate_batch(requests[start : start + BATCH])
        return outputs

    def _generate_batch(self, batch: list[tuple[list[int], int]]) -> list[list[int]]:
        width = max(len(ids) for ids, _ in batch)
        missing = [width - len(ids) for ids, _ in batch]
        rows = [[PAD] * n + ids for n, (ids, _) in zip(missing, batch, strict=True)]
        masks = [[0] * n + [1] * (width - n) for n in missing]
        with self._torch.inference_mode():
            result = self._model.generate(
                self._torch.tensor(rows),
                attention_mask=self._torch.tensor(masks),
                max_new_tokens=max(count for _, count in batch),
            )
        made = result[:, width:].tolist()
        return [ids[:count] for ids, (_, count) in zip(made, batch, strict=True)]

    def forget(self) -> None:
        """It keeps nothing between calls."""
