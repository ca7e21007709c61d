"""A small random model with a tokenizer, in a folder, and transformers' answers for it.

The tokenizer knows printable ASCII and a few dozen pieces of it, so that whatever the model
generates is readable text; the model is one of `tests.models.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel
from transformers import logging as transformers_logging

from quire import LLM
from tests.models.reference import VOCAB, random_model, reference_logits, save_safetensors
from tests.text.tokenizer_samples import CORPUS, flagged, write_json

transformers_logging.disable_progress_bar()
torch.set_num_threads(1)  # sharing out tiny operators costs more than it saves

END = "<|end|>"
END_ID = 0
MAX_LEN = 192

Tokens = Sequence[int]


@cache
def ascii_tokenizer() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    printable = ["\u0120", "\u010a", *map(chr, range(ord("!"), ord("~") + 1))]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=printable,
        limit_alphabet=len(printable),
        show_progress=False,
    )
    backend.train_from_iterator([line for line in CORPUS if line.isascii()], trainer)
    assert backend.get_vocab_size() == VOCAB
    return backend


def save_tokenizer(folder: Path, **config: Any) -> None:
    ascii_tokenizer().save(str(folder / "tokenizer.json"))
    values = {
        "eos_token": END,
        "added_tokens_decoder": {str(END_ID): flagged(END, special=True)},
        "tokenizer_class": "PreTrainedTokenizerFast",
        **config,
    }
    write_json(folder / "tokenizer_config.json", values)


def save_tiny(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    shards: bool = False,
    tokenizer_config: dict[str, Any] | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """Write model and tokenizer to `folder`; returns the model."""
    length = "n_positions" if family == "gpt2" else "max_position_embeddings"
    ids = {"bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": None}
    model = random_model(family, seed, **{length: MAX_LEN, **ids, **changes})
    save_safetensors(model, folder, shards)
    save_tokenizer(folder, **(tokenizer_config or {}))
    return model


def tiny_llm(folder: Path | str, **options: Any) -> LLM:
    """An engine with a small cache on one thread."""
    settings = {"num_threads": 1, "kv_cache_memory_bytes": "32MiB", **options}
    return LLM(str(folder), **settings)


def text_ids(text: str) -> list[int]:
    """Tokens by the tokenizers library alone."""
    ids: list[int] = ascii_tokenizer().encode(text).ids
    return ids


@torch.no_grad()
def greedy(model: PreTrainedModel, prompts: Sequence[Tokens], steps: int) -> list[list[int]]:
    """transformers' `generate`, in batches of equally long prompts."""
    found: dict[int, list[int]] = {}
    for length in sorted({len(prompt) for prompt in prompts}):
        places = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([list(prompts[i]) for i in places])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=steps,
            eos_token_id=VOCAB,  # no such token: nothing ends early
            pad_token_id=0,
        )
        found |= dict(zip(places, made[:, length:].tolist(), strict=True))
    return [found[i] for i in range(len(prompts))]


def logprobs(model: PreTrainedModel, tokens: Tokens) -> torch.Tensor:
    """[len, vocab]: line i is what transformers thinks of position i + 1."""
    return reference_logits(model, tokens).double().log_softmax(-1)


def is_greedy(model: PreTrainedModel, prompt: Tokens, made: Tokens, tie: float = 1e-3) -> bool:
    """Whether every token is transformers' most likely one after those before it, ties aside."""
    lines = logprobs(model, [*prompt, *made])[len(prompt) - 1 : -1]
    chosen = lines.gather(1, torch.tensor(list(made))[:, None])[:, 0]
    return bool((lines.max(-1).values - chosen).max() <= tie)


def assert_at_rest(llm: LLM) -> None:
    """Nothing is running or waiting, every block is free, no sequence stands in a grammar, and the
    integrity check passes."""
    core = llm._core
    assert not core.has_work
    assert not core.grammars._matchers
    assert core.scheduler.kv.pool.num_used == 0
    core.scheduler.check_integrity()
