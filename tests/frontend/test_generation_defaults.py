"""What requests get that say nothing: of a generation_config.json, or of the embedded model's own.

A change that makes chats of the embedded model endless, or gives other models its settings, turns
these red.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quire.config import embedded
from quire.config.model import ModelConfig, load_model_config
from quire.frontend.output_processor import repeats
from quire.frontend.session import chat_defaults, generation_defaults
from quire.protocol.sampling import SamplingParams


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return load_model_config(None)


def of_another(model: ModelConfig, **generation: object) -> ModelConfig:
    source = replace(model.source, path=Path("other.gguf"))
    return replace(model, source=source, generation=generation)


def test_embedded_model_has_settings_of_its_own(model: ModelConfig) -> None:
    assert generation_defaults("auto", model) == SamplingParams(**embedded.GENERATION)
    chat = chat_defaults("auto", model)
    assert chat.max_tokens == embedded.CHAT_MAX_TOKENS < model.max_position_tokens
    assert chat.repetition_detection is not None
    assert chat.temperature == embedded.GENERATION["temperature"]
    by_path = load_model_config(str(model.source.path))
    assert chat_defaults("auto", by_path) == chat


def test_vllm_stands_for_none(model: ModelConfig) -> None:
    assert generation_defaults("vllm", model) == SamplingParams()
    assert chat_defaults("vllm", model) == SamplingParams(max_tokens=None)


def test_other_models_keep_theirs(model: ModelConfig, tmp_path: Path) -> None:
    plain = of_another(model)
    assert generation_defaults("auto", plain) == SamplingParams()
    assert chat_defaults("auto", plain) == SamplingParams(max_tokens=None)
    limited = of_another(model, max_new_tokens=7, temperature=0.5)
    assert chat_defaults("auto", limited) == SamplingParams(temperature=0.5, max_tokens=7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 9}))
    assert chat_defaults(str(tmp_path), limited) == SamplingParams(max_tokens=9)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 33, 64])
def test_cycles_of_any_size_end_a_chat(model: ModelConfig, size: int) -> None:
    """Four times what is repeated, or 64 tokens and a little more of what is shorter."""
    detection = chat_defaults("auto", model).repetition_detection
    assert detection is not None
    tokens = list(range(1000, 1040))
    while not repeats(tokens, detection):
        tokens.append(len(tokens) % size)
        assert len(tokens) <= 40 + max(4 * size, 64 + 4 * size)
    assert len(tokens) >= 40 + 64


def test_lists_and_numbers_do_not(model: ModelConfig) -> None:
    detection = chat_defaults("auto", model).repetition_detection
    assert detection is not None
    for tokens in ([5] * 40, [1, 2] * 20, [*range(100), *range(100), *range(100)]):
        assert not any(repeats(tokens[:end], detection) for end in range(1, len(tokens)))
