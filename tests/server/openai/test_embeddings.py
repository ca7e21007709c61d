"""Embeddings as the official client sees them; vectors are those of `LLM.embed`, which has a
reference of its own."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

from quire import LLM, PoolingParams
from tests.server.running import RunningServer

TEXTS = ["The capital of France is Paris.", "Bread", "one two three four five six seven"]


def expected(llm: LLM, prompts: Any, **params: Any) -> list[list[float]]:
    outputs = llm.embed(prompts, pooling_params=PoolingParams(**params), use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


@pytest.mark.parametrize("pooling", [None, "last", "mean"])
def test_vectors_of_texts(client: openai.OpenAI, model: str, llm: LLM, pooling: Any) -> None:
    """The client asks for base64 by itself, and for numbers when told to."""
    wanted = expected(llm, TEXTS, pooling=pooling or "last")
    extra = {} if pooling is None else {"pooling": pooling}
    settings: Any = {"model": model, "input": TEXTS, "extra_body": extra}
    packed = client.embeddings.create(**settings)
    plain = client.embeddings.create(**settings, encoding_format="float")
    for reply in (packed, plain):
        assert [one.index for one in reply.data] == [0, 1, 2]
        np.testing.assert_allclose([one.embedding for one in reply.data], wanted, atol=1e-5)
    tokenizer = llm.get_tokenizer()
    count = sum(len(tokenizer.encode(text)) for text in TEXTS)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == count
    assert plain.model == model


def test_base64_is_little_endian_floats(server: RunningServer, llm: LLM) -> None:
    body = {"input": TEXTS[0], "encoding_format": "base64", "dimensions": 16}
    (one,) = server.request("POST", "/v1/embeddings", body).json["data"]
    vector = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
    (wanted,) = expected(llm, TEXTS[:1], dimensions=16)
    np.testing.assert_allclose(vector, wanted, atol=1e-5)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_token_ids_and_raw_lengths(client: openai.OpenAI, model: str, llm: LLM) -> None:
    ids = [[1, 2, 3], [4, 5]]
    extra = {"normalize": False}
    many = client.embeddings.create(model=model, input=ids, extra_body=extra)
    one = client.embeddings.create(model=model, input=ids[1], extra_body=extra)
    wanted = expected(llm, ids, normalize=False)
    np.testing.assert_allclose([d.embedding for d in many.data], wanted, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(one.data[0].embedding, wanted[1], rtol=1e-3, atol=1e-3)
    assert many.usage.total_tokens == 5


async def test_async_client(server: RunningServer, model: str, llm: LLM) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    reply = await client.embeddings.create(model=model, input="Bread", dimensions=8)
    (wanted,) = expected(llm, ["Bread"], dimensions=8)
    np.testing.assert_allclose(reply.data[0].embedding, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"input": "a", "pooling": "cls"}, "pooling", "must be one of last, mean"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "dimensions": 577}, "dimensions", "more than the model's 576"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        ({"input": "a", "priority": 1}, "priority", "scheduling_policy"),
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "empty list"),
        ({"input": ["a", ""]}, "input", r"prompts[1]"),
        ({"input": [10**9]}, "input", "vocabulary"),
        ({"input": "word " * 3000}, "input", "max_model_len"),
        ({"input": {"text": "a"}}, "input", ""),
        ({}, "input", "required"),
    ],
)
def test_refusals(server: RunningServer, body: Any, param: str, reason: str) -> None:
    reply = server.request("POST", "/v1/embeddings", body)
    assert reply.status == 400 and reply.error["param"] == param
    assert reason in reply.error["message"]
