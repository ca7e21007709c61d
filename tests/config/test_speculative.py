"""`speculative_config`: vLLM's keys, and errors that name what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.options import EngineOptions
from quire.config.resolve import check_options
from quire.config.speculative import SpeculativeConfig
from quire.protocol.errors import OptionError


def read(config: dict[Any, Any] | None = None, **more: Any) -> SpeculativeConfig | None:
    config = {**(config or {}), **more}
    return EngineOptions.from_arguments(speculative_config=config).decoding.speculation


def test_nothing_is_drafted_unless_asked_for() -> None:
    assert EngineOptions().decoding.speculation is None
    assert read() is None


def test_ngrams_have_vllms_defaults() -> None:
    assert read(method="ngram", num_speculative_tokens=3) == SpeculativeConfig("ngram", 3, 5, 5)
    one = read(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4)
    assert one == SpeculativeConfig("ngram", 3, 4, 4)
    one = read(model="[ngram]", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=4)
    assert one == SpeculativeConfig("ngram", 3, 2, 4)


def test_auto_needs_no_number() -> None:
    found = read(method="auto")
    assert found is not None and found.is_measured
    assert found.num_tokens >= 2 and found.min_ngram < found.max_ngram


def test_auto_may_have_a_model() -> None:
    found = read(method="auto", model="x", max_model_len=9, prompt_lookup_max=4)
    assert found is not None and found.is_measured and found.uses_model and found.reads_text
    assert found.num_ahead == found.num_tokens == 4
    assert (found.min_ngram, found.max_ngram, found.max_model_len) == (4, 4, 9)
    for config in ({}, {"model": "ngram"}):
        found = read(method="auto", **config)
        assert found is not None and not found.uses_model and not found.num_ahead


def test_methods_of_heads_may_be_left_out() -> None:
    """They follow from checkpoints, and so may the number of drafts."""
    found = read(model="x")
    assert found is not None and found.model == "x" and not found.num_tokens
    assert found.method not in ("draft_model", "eagle3", "mtp")
    found = read(num_speculative_tokens=2)
    assert found == SpeculativeConfig("mtp", 2, 0, 0) and found.uses_head
    found = read(method="eagle3", model="x", num_speculative_tokens=3)
    assert found is not None and found.uses_head and found.num_ahead == 0


@pytest.mark.parametrize("name", ["deepseek_mtp", "glm4_moe_mtp"])
def test_mtp_has_vllms_names_too(name: str) -> None:
    assert read(method=name, num_speculative_tokens=2) == SpeculativeConfig("mtp", 2, 0, 0)


def test_keys_of_a_draft_model() -> None:
    found = read(model="x", num_speculative_tokens=2, max_model_len=9, quantization="fp8")
    assert found is not None and not found.uses_head and found.num_ranks is None
    assert (found.model, found.max_model_len, found.quantization) == ("x", 9, "fp8")
    found = read(model="x", num_speculative_tokens=2, draft_tensor_parallel_size=1)
    assert found is not None and found.num_ranks == 1


def test_drafts_by_batch_size() -> None:
    table = [[1, 4, 3], [5, 8, 0]]
    found = read(
        method="ngram", num_speculative_tokens=3, num_speculative_tokens_per_batch_size=table
    )
    assert found is not None and found.schedule == ((1, 4, 3), (5, 8, 0))


BAD: list[tuple[dict[Any, Any], tuple[str, ...]]] = [
    ({"prompt_lookup_max": 2}, ("'method'", "ngram, auto")),
    ({"method": "ngrams", "num_speculative_tokens": 2}, ("'method'", "'ngrams'")),
    ({"method": "ngram"}, ("'num_speculative_tokens'", "None")),
    ({"method": "ngram", "num_speculative_tokens": 0}, ("'num_speculative_tokens'", "0")),
    ({"method": "ngram", "num_speculative_tokens": 99}, ("'num_speculative_tokens'", "16", "99")),
    ({"method": "ngram", "num_speculative_tokens": True}, ("'num_speculative_tokens'", "True")),
    ({"method": "auto", "prompt_lookup_min": 9, "prompt_lookup_max": 3}, ("prompt_lookup_min",)),
    ({"method": "auto", "prompt_lookup_max": 99}, ("prompt_lookup_max", "32")),
    ({"method": "auto", "prompt_lookup_max": "x"}, ("'prompt_lookup_max'", "'x'")),
    ({"method": "auto", "prompt_lookup_max": 0}, ("'prompt_lookup_max'", "at least 1")),
    ({"method": "auto", "prompt_lookup_min": 40}, ("'prompt_lookup_min'", "32", "40")),
    ({"method": None}, ("'method'", "ngram, auto", "None")),
    ({"method": "mimo_mtp"}, ("'mimo_mtp'", "not supported", "eagle3, mtp")),
    ({1: 2}, ("[1]", "unknown", "num_speculative_tokens")),
    ({1: 2, "model": "x"}, ("[1]", "unknown")),
    ({"method": "auto", "quantization": "fp8"}, ("'quantization'", "no model")),
    ({"method": "auto", "k": 1}, ("'k'", "unknown", "num_speculative_tokens")),
    ({"method": "eagle3", "num_speculative_tokens": 2}, ("'model'", "None")),
    ({"method": "eagle3", "model": "x", "prompt_lookup_max": 2}, ("prompt_lookup_max",)),
    ({"method": "eagle", "model": "x"}, ("'eagle'", "not supported", "eagle3, mtp")),
    ({"method": "draft_model", "num_speculative_tokens": 2}, ("'model'", "None")),
    (
        {"model": "x", "num_speculative_tokens": 2, "max_model_len": 0},
        ("max_model_len", "at least 1"),
    ),
    ({"method": "medusa", "model": "x"}, ("'medusa'", "not supported", "auto")),
    *(
        (
            {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "num_speculative_tokens_per_batch_size": table,
            },
            ("num_speculative_tokens_per_batch_size", "least requests"),
        )
        for table in (5, [[1, 2]], [[2, 1, 1]], [[1, 2, 4]], [[0, 2, 1]], [["1", 2, 3]])
    ),
    *(
        (
            {"method": "auto", "num_speculative_tokens_per_batch_size": table},
            ("num_speculative_tokens_per_batch_size", "not overlap", str(table)),
        )
        for table in ([[1, 4, 2], [4, 8, 1]], [[5, 8, 2], [1, 9, 1]], [[1, 9, 2], [2, 3, 1]])
    ),
]


@pytest.mark.parametrize(("config", "parts"), BAD)
def test_mistakes_are_named(config: dict[Any, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        read(config)
    assert all(part in str(caught.value) for part in ("speculative_config", *parts))


def test_the_format_of_a_draft_model_is_one_of_those_that_are_known() -> None:
    config = {"model": "x", "num_speculative_tokens": 2, "quantization": "foo"}
    options = EngineOptions.from_arguments(speculative_config=config)
    message = r"speculative_config\['quantization'\]='foo' is not supported; .*int8.*gptq"
    with pytest.raises(OptionError, match=message):
        check_options(options)


def test_a_pipeline_cannot_draft() -> None:
    options = EngineOptions.from_arguments(
        speculative_config={"method": "auto"}, pipeline_parallel_size=2
    )
    with pytest.raises(OptionError, match="pipeline_parallel_size=2"):
        check_options(options)
