"""One tiny model, and one engine for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quire import LLM


@dataclass
class Tiny:
    folder: Path
    model: PreTrainedModel
    """transformers' model of the same weights."""


CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    from tests.tiny import save_tiny

    folder = tmp_path_factory.mktemp("tiny")
    model = save_tiny(folder, tokenizer_config={"chat_template": CHAT_TEMPLATE})
    return Tiny(folder, model)


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> Iterator[LLM]:
    from tests.tiny import assert_at_rest, tiny_llm

    with tiny_llm(tiny.folder) as engine:
        yield engine
        assert_at_rest(engine)
