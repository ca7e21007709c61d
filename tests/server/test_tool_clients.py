"""Libraries that build on tool calls and structured output, against a real server."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from tests.server.running import RunningServer

QUESTION = "What is the weather in Paris?"


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=-50, le=60)


@tool
def get_weather(city: Literal["Paris", "Rome"], unit: Literal["celsius", "fahrenheit"]) -> str:
    """The weather in a city now."""
    return f"18 degrees {unit} in {city}"


def chat(server: RunningServer, model: str) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key=SecretStr("none"),
        model=model,
        temperature=0,
        max_tokens=120,  # type: ignore[call-arg]
        max_retries=0,
    )


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_langchain_bind_tools(server: RunningServer, model: str, choice: str) -> None:
    bound = chat(server, model).bind_tools(
        [get_weather], tool_choice=choice, parallel_tool_calls=False
    )
    answer: Any = bound.invoke(QUESTION)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and "18 degrees" in get_weather.invoke(call["args"])
    chunks: list[Any] = list(bound.stream(QUESTION))
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert [(c["name"], c["args"]) for c in total.tool_calls] == [("get_weather", call["args"])]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_with_structured_output(server: RunningServer, model: str, method: Any) -> None:
    made = chat(server, model).with_structured_output(Weather, method=method).invoke(QUESTION)
    assert isinstance(made, Weather)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_instructor(client: openai.OpenAI, model: str, mode: instructor.Mode) -> None:
    patched = instructor.from_openai(client, mode=mode)
    made = patched.chat.completions.create(
        model=model,
        response_model=Weather,
        messages=[{"role": "user", "content": QUESTION}],
        max_retries=0,
        temperature=0,
        max_tokens=120,
    )
    assert isinstance(made, Weather)
