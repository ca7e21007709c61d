"""Structured output: JSON by a Pydantic model, one of several words, XML by a grammar."""

from typing import Literal

from pydantic import BaseModel

from quire import LLM, SamplingParams, StructuredOutputs

llm = LLM()


def answer(question: str, grammar: StructuredOutputs, max_tokens: int = 200) -> str:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=grammar)
    (reply,) = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
    return reply.outputs[0].text


class Pet(BaseModel):
    species: Literal["cat", "dog", "bird"]
    has_fur: bool


# A schema allows further keys unless it says otherwise. Without spaces the grammar leaves fewer
# choices, and more tokens come for free.
pet = StructuredOutputs(json=Pet, disable_additional_properties=True, disable_any_whitespace=True)
text = answer("Describe a cat.", pet)
print(f"JSON: {text}")
print(f"as an object: {Pet.model_validate_json(text)!r}")

print(f"choice: {answer('Is Paris in France?', StructuredOutputs(choice=['yes', 'no']))}")
question = "When did the Second World War end?"
print(f"regex: {answer(question, StructuredOutputs(regex='19[0-9]{2}'))}")

# Lark's notation: rules in small letters, patterns between slashes. llama.cpp's GBNF works too.
XML = r"""
start: "<planets>" planet planet planet "</planets>"
planet: "<planet>" NAME "</planet>"
NAME: /[A-Z][a-z]{2,15}/
"""
print(f"XML: {answer('Name three planets.', StructuredOutputs(grammar=XML))}")
