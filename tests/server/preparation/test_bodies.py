"""Bodies follow from what `SamplingParams` declares."""

from __future__ import annotations

import dataclasses

import pytest
from pydantic import ValidationError

from quire import SamplingParams
from quire.protocol.sampling import PARAMETERS
from quire.server.preparation.bodies import GenerationBody

VALUES = {
    "n": 2,
    "temperature": 0.5,
    "stop": ["a", "b"],
    "stop_token_ids": [3, 4],
    "ignore_eos": True,
    "prompt_logprobs": 2,
    "speculation": False,
    "logit_bias": {"7": -1.5},
    "bad_words": ["x"],
    "spaces_between_special_tokens": False,
}


def test_every_sampling_parameter_is_reachable_or_says_why_not() -> None:
    names = {item.name for item in dataclasses.fields(SamplingParams)} - {"bad_words_token_ids"}
    assert names == set(PARAMETERS)
    in_bodies = {name for name, info in PARAMETERS.items() if not info.not_in_bodies}
    assert in_bodies == names & set(GenerationBody.model_fields)


def test_values_of_a_body_reach_the_parameters() -> None:
    params = GenerationBody(**VALUES).sampling_params(SamplingParams(top_k=5))
    expected = {**VALUES, "logit_bias": {7: -1.5}}
    assert params == SamplingParams(**expected, top_k=5, repetition_detection=None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", "x"), ("stop", 5), ("stop_token_ids", ["a"]), ("ignore_eos", 7), ("logit_bias", [1])],
)
def test_bodies_have_the_types_of_the_parameters(name: str, value: object) -> None:
    with pytest.raises(ValidationError):
        GenerationBody(**{name: value})
