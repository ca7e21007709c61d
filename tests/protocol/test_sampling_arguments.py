"""Arguments of parameter classes that do not exist get a reason or the nearest name."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from quire import BeamSearchParams, PoolingParams, RequestError, SamplingParams


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: SamplingParams(best_of=2), r"best_of does not exist .got 2.: set n"),
        (lambda: SamplingParams(logits_processors=[]), "requests bring no code into the engine"),
        (lambda: SamplingParams(use_beam_search=True), "use LLM.beam_search"),
        (lambda: SamplingParams(max_token=3), "did you mean max_tokens?"),
        (lambda: SamplingParams(temprature=0), "did you mean temperature?"),
        (lambda: SamplingParams(xyzzy=1), "it has n, presence_penalty"),
        (lambda: SamplingParams.from_optional(best_of=2), "best_of does not exist"),
        (lambda: BeamSearchParams(beam_widht=2, max_tokens=3), "did you mean beam_width?"),
        (lambda: PoolingParams(normalise=True), "did you mean normalize?"),
    ],
)
def test_unknown_arguments(made: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        made()


@pytest.mark.parametrize("value", ["no", None, 0])
@pytest.mark.parametrize("name", ["speculation", "ignore_eos", "detokenize"])
def test_booleans_are_nothing_else(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} must be true or false, got {value!r}"):
        SamplingParams(**{name: value})


def test_from_optional() -> None:
    """None means the default, but for max_tokens, where it means up to the end of the context."""
    made = SamplingParams.from_optional(n=None, top_p=0.5, best_of=None, stop=None, max_tokens=None)
    assert made == SamplingParams(top_p=0.5, max_tokens=None)
    assert SamplingParams.from_optional() == SamplingParams()


def test_copies_are_equal() -> None:
    params = SamplingParams(n=2, stop=["x"], logit_bias={3: 1.0})
    for other in (copy.copy(params), params.clone(), pickle.loads(pickle.dumps(params))):
        assert other == params and other is not params
