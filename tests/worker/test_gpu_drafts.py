"""Drafts on a GPU: verified without waiting for the device, and the text stays what it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from quire import LLM, SamplingParams
from quire.protocol.plan import StepPlan
from quire.worker.model_runner import ModelRunner

pytestmark = pytest.mark.gpu
LENGTH = 48
NUM_DRAFTS = 3
PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.7, "seed": 4, "top_p": 0.9, "presence_penalty": 0.4, "logprobs": 1},
)


class KnownTexts:
    """Proposes what follows in a text that the row's first token names; one draft in five is
    wrong."""

    def __init__(self, runner: ModelRunner, texts: list[list[int]]) -> None:
        self._table = runner.table
        device, longest = self._table.device, max(map(len, texts)) + NUM_DRAFTS
        padded = np.zeros((512, longest), np.int32)
        for text in texts:
            padded[text[0], : len(text)] = text
        self._texts = torch.from_numpy(padded).to(device)
        self.num_tokens = torch.zeros(2, dtype=torch.int64, device=device)
        """Accepted, and samples in all."""

    def update(self, plan: StepPlan) -> None:
        """The table has all that it needs."""

    def accepted(self, rows: Tensor, counts: Tensor | None) -> None:
        self.num_tokens[0] += len(rows) if counts is None else counts.sum()
        self.num_tokens[1] += len(rows)

    def propose(self, rows: Tensor) -> Tensor:
        rows = rows.long()
        places = self._table.num_tokens[rows][:, None] + torch.arange(
            NUM_DRAFTS, device=rows.device
        )
        texts = self._table.token_ids[rows, 0].long()
        drafts = self._texts[texts[:, None], places.clamp_max(self._texts.shape[1] - 1)]
        return (drafts + (places % 5 == 0).int()) % 512


@contextmanager
def never_waiting(runner: ModelRunner) -> Iterator[None]:
    """Any wait for the device inside a launch is an error."""
    sample = runner.sample

    def checked(*args: object) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return sample(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.sample = checked
    yield
    del runner.sample


@pytest.mark.parametrize("count", [3, 40])
def test_drafts_change_no_text_and_make_no_launch_wait(tmp_path: Path, count: int) -> None:
    """Few rows and many. Rounding may decide a token, as other kernels run; hardly ever in float32
    where weights are large."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=512, **sizes, **heads, eos_token_id=None, initializer_range=0.2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    dice = np.random.default_rng(1)
    prompts = [[5 + i, *dice.integers(5, 500, 3 + i).tolist()] for i in range(count)]
    work = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [SamplingParams(**PARAMS[i % 4], max_tokens=LENGTH) for i in range(count)]
    limits = {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 64, "max_model_len": 256}
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", **limits) as llm:
        plain = [list(o.outputs[0].token_ids) for o in llm.generate(work, params, use_tqdm=False)]
        runner = llm._core.executor.runner
        texts = [prompt + tokens for prompt, tokens in zip(prompts, plain, strict=True)]
        drafter = KnownTexts(runner, texts)
        runner.drafter, llm._core.scheduler.speculation.num_drafts = drafter, NUM_DRAFTS
        llm.generate(work[:1], params[:1], use_tqdm=False)  # compiles
        drafter.num_tokens.zero_()
        with never_waiting(runner):
            outputs = llm.generate(work, params, use_tqdm=False)
        found = [list(output.outputs[0].token_ids) for output in outputs]
    same = sum(tokens == expected for tokens, expected in zip(found, plain, strict=True))
    assert same >= 0.9 * count
    accepted, samples = drafter.num_tokens.tolist()
    assert 1.5 * samples < accepted < (1 + NUM_DRAFTS) * samples
