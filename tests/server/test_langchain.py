"""LangChain and plain httpx as clients."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import SecretStr

from quire import LLM
from tests.server.running import RunningServer

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


def chat(server: RunningServer, model: str, **settings: Any) -> ChatOpenAI:
    settings = {"temperature": 0, "max_tokens": 12, "max_retries": 0, "timeout": 120, **settings}
    return ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=SecretStr("none"), model=model, **settings
    )


@pytest.mark.parametrize("protocol", ["chat completions", "responses"])
def test_invoke_stream_and_batch(server: RunningServer, model: str, protocol: str) -> None:
    client = chat(server, model, use_responses_api=protocol == "responses", stream_usage=True)
    whole = client.invoke(QUESTION)
    assert whole.text == ANSWER and whole.usage_metadata is not None
    usage = whole.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    chunks = list(client.stream(QUESTION))
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert total.text == ANSWER and len(chunks) > 3 and total.usage_metadata is not None
    assert total.usage_metadata["output_tokens"] == usage["output_tokens"]
    told = [SystemMessage("You know cities."), HumanMessage(QUESTION)]
    answers = client.batch([QUESTION, told, QUESTION])
    assert [answer.text for answer in answers] == [ANSWER, client.invoke(told).text, ANSWER]


async def test_asynchronous_stream(server: RunningServer, model: str) -> None:
    chunks = [chunk.text async for chunk in chat(server, model).astream(QUESTION)]
    assert "".join(chunks) == ANSWER


def test_embeddings(server: RunningServer, model: str, llm: LLM) -> None:
    client = OpenAIEmbeddings(
        base_url=f"{server.url}/v1",
        api_key=SecretStr("none"),
        model=model,
        check_embedding_ctx_length=False,  # it would fetch OpenAI's tokenizer
    )
    texts = ["Bread", "Butter"]
    wanted = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
    np.testing.assert_allclose(client.embed_documents(texts), wanted, atol=1e-5)


def test_raw_events(server: RunningServer, model: str) -> None:
    """Line by line, as a client without any library for this reads them."""
    body: dict[str, Any] = {"model": model, "temperature": 0, "stream": True}
    body["messages"] = [{"role": "user", "content": QUESTION}]
    body["stream_options"] = {"include_usage": True}
    url = f"{server.url}/v1/chat/completions"
    with httpx.Client(timeout=120) as client, client.stream("POST", url, json=body) as reply:
        assert reply.status_code == 200 and reply.http_version == "HTTP/1.1"
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-cache"
        lines = list(reply.iter_lines())
    assert lines[1::2] == [""] * (len(lines) // 2), "each event is one line and an empty one"
    assert lines[-2] == "data: [DONE]"
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-2:2]]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == ANSWER
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    usage = last["usage"]
    assert last["choices"] == []
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
