"""A tiny model of random weights, and benchmarks run on it through the `quire` command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}

Bench = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def model_words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that name the tiny model."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return ["--model", str(folder), "--load-format", "dummy", "--skip-tokenizer-init"]


@pytest.fixture
def bench(model_words: list[str], tmp_path: Path) -> Bench:
    """Runs `quire bench NAME --quick ...` and returns what it wrote as JSON."""

    def run(name: str, *words: str) -> dict[str, Any]:
        path = tmp_path / "figures.json"
        assert main(["bench", name, "--quick", "--json", str(path), *model_words, *words]) == 0
        figures: dict[str, Any] = json.loads(path.read_text())
        assert figures["benchmark"] == name
        return figures

    return run
