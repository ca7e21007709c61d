"""A JSON schema, and a model made to follow one."""

from __future__ import annotations

from typing import Any

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputs

PERSON = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 6},
        "customer_age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_customer": {"type": "boolean"},
    },
    "required": ["customer_name", "customer_age", "is_customer"],
    "additionalProperties": False,
}
TIGHT = StructuredOutputs(json=PERSON, disable_any_whitespace=True)


def run(
    llm: LLM, grammar: StructuredOutputs, prompt: Any = "of the", **params: Any
) -> RequestOutput:
    values = {"max_tokens": 150, "seed": 1, **params}
    wanted = SamplingParams(structured_outputs=grammar, **values)
    return llm.generate(prompt, wanted, use_tqdm=False)[0]
