"""Bodies and `SamplingParams` stay in step."""

from __future__ import annotations

import dataclasses

from quire import SamplingParams
from quire.server.preparation.bodies import NOT_IN_BODIES, GenerationBody


def test_every_sampling_parameter_is_reachable_or_listed() -> None:
    names = {item.name for item in dataclasses.fields(SamplingParams)}
    assert names - set(GenerationBody.model_fields) <= set(NOT_IN_BODIES)
    assert set(NOT_IN_BODIES) <= names
