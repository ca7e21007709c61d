"""Harmony over a real socket. The model is random and its tokenizer has the markers as special
tokens, as gpt-oss has them: grammars leave it one text to write, or biases choose for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from quire import LLM
from quire.config.reply_formats import HARMONY
from quire.config.server import ServingOptions
from quire.server.openai.chat import ChatBody
from quire.server.preparation.prepare import Preparation, PreparationSettings
from tests.models.reference import VOCAB
from tests.server.running import TINY, RunningServer, eventually
from tests.server.test_tool_calls import joined_calls
from tests.text.tokenizer_samples import write_json
from tests.text.tool_calls import templates
from tests.tiny import ascii_tokenizer, save_tiny

MARKERS = (*HARMONY.markers, "<|endoftext|>")
ENDS = ("<|return|>", "<|endoftext|>", "<|call|>")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "square", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "cube", "parameters": SCHEMA}},
]
QUESTION: Any = [{"role": "user", "content": "What is 7 squared?"}]
THINKS = "<|channel|>analysis<|message|>7 times 7.<|end|><|start|>assistant"
CALLS = '<|channel|>commentary to=functions.square <|constrain|>json<|message|>{"a": 7}'
SAYS = "<|channel|>commentary<|message|>I square it.<|end|><|start|>assistant"
ANSWERS = "<|channel|>final<|message|>It is 49."


def harmony_tokenizer() -> Backend:
    backend = Backend.from_str(ascii_tokenizer().to_str())
    backend.add_special_tokens([AddedToken(one, special=True) for one in MARKERS])
    return backend


IDS = {one: harmony_tokenizer().token_to_id(one) for one in MARKERS}


def save_model(folder: Path, ends: tuple[str, ...]) -> None:
    """A random model whose generation_config.json names these ends."""
    save_tiny(
        folder,
        vocab_size=VOCAB + len(MARKERS),
        eos_token_id=IDS["<|return|>"],
        max_position_embeddings=2048,
        tokenizer_config={
            "eos_token": "<|return|>",
            "chat_template": templates.HARMONY,
            "added_tokens_decoder": {},
        },
    )
    harmony_tokenizer().save(str(folder / "tokenizer.json"))
    write_json(folder / "generation_config.json", {"eos_token_id": [IDS[one] for one in ends]})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("harmony")
    save_model(folder, ENDS)
    running = RunningServer.start(
        "--model", str(folder), "--served-model-name", "m", *TINY, "--log-level", "debug"
    )
    assert running.url, "".join(running.lines)
    yield running
    assert running.stop() == 0, "".join(running.lines)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


def forced(text: str, end: str = "<|return|>") -> dict[str, Any]:
    """What makes the model write this text, then this end."""
    parts = [one for one in re.split(r"(<\|\w+\|>)", text) if one]
    words = [f"<[{IDS[one]}]>" if one in IDS else json.dumps(one) for one in parts]
    bias = {str(IDS[one]): 100 if one == end else -100 for one in ENDS}
    grammar = "start: " + " ".join(words)
    return {"structured_outputs": {"grammar": grammar}, "logit_bias": bias}


def ask(client: openai.OpenAI, text: str, end: str = "<|return|>", **more: Any) -> Any:
    extra = {**forced(text, end), **more.pop("extra_body", {})}
    settings = {"model": "m", "messages": QUESTION, "max_tokens": 300, **more}
    return client.chat.completions.create(**settings, extra_body=extra)


def test_the_log_says_what_was_found(server: RunningServer) -> None:
    for words in ("calls are read in the format harmony", "between <|channel|>analysis<|message|>"):
        eventually(lambda words=words: words in "".join(server.lines), words)  # type: ignore[misc]


def test_an_answer_is_apart_from_reasoning(client: openai.OpenAI) -> None:
    (choice,) = ask(client, THINKS + ANSWERS).choices
    message = choice.message
    assert (message.reasoning, message.content) == ("7 times 7.", "It is 49.")
    assert choice.finish_reason == "stop" and message.tool_calls is None
    (choice,) = ask(client, THINKS + ANSWERS, extra_body={"include_reasoning": False}).choices
    assert choice.message.content == "It is 49."
    assert "reasoning" not in (choice.message.model_extra or {})


@pytest.mark.parametrize("parallel", [False, True])
def test_a_call(client: openai.OpenAI, parallel: bool) -> None:
    text = THINKS + SAYS + (CALLS + "<|end|><|start|>assistant") * parallel + CALLS
    settings: Any = {"tools": TOOLS, "end": "<|call|>"}
    (whole,) = ask(client, text, **settings).choices
    assert whole.message.reasoning == "7 times 7." and whole.message.content == "I square it."
    made = [(one.function.name, one.function.arguments) for one in whole.message.tool_calls]
    assert made == [("square", '{"a": 7}')] * (1 + parallel)
    assert whole.finish_reason == "tool_calls"
    chunks = list(ask(client, text, stream=True, **settings))
    content, calls, reason = joined_calls(chunks)
    assert [(name, arguments) for _, name, arguments in calls] == made
    assert content == "I square it." and reason == "tool_calls"
    reasoning = [getattr(chunk.choices[0].delta, "reasoning", None) for chunk in chunks]
    assert "".join(filter(None, reasoning)) == "7 times 7."


def test_a_call_ends_the_reply(client: openai.OpenAI) -> None:
    """Where the grammar has room for more; the marker itself is not shown."""
    extra = forced(f"{CALLS}<|end|><|start|>assistant", "<|call|>")
    _, _, again = extra["structured_outputs"]["grammar"].partition(": ")
    _, _, once = forced(CALLS)["structured_outputs"]["grammar"].partition(": ")
    extra["structured_outputs"]["grammar"] = f"start: ({again})* {once}"
    settings: Any = {"model": "m", "messages": QUESTION, "tools": TOOLS, "max_tokens": 500}
    (choice,) = client.chat.completions.create(**settings, extra_body=extra).choices
    assert len(choice.message.tool_calls or ()) == 1 and choice.message.content is None
    assert choice.finish_reason == "tool_calls"


def test_a_call_without_arguments(client: openai.OpenAI) -> None:
    """It is one because it has ended, which only its marker says: there is room for more text."""
    extra = forced(CALLS.removesuffix('{"a": 7}'), "<|call|>")
    extra["structured_outputs"]["grammar"] += ' "{\\"a\\": 7}"?'
    settings: Any = {"model": "m", "messages": QUESTION, "tools": TOOLS, "max_tokens": 100}
    (choice,) = client.chat.completions.create(**settings, extra_body=extra).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("square", "{}")
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_is_cut_off(client: openai.OpenAI, stream: bool) -> None:
    """After each of its tokens: some of it may be missing, nothing is in the wrong place."""
    whole = THINKS + CALLS
    total = len(harmony_tokenizer().encode(whole).ids)
    for limit in range(1, total, 3):
        reply = ask(client, whole, tools=TOOLS, max_tokens=limit, stream=stream)
        if stream:
            chunks = list(reply)
            content, calls, reason = joined_calls(chunks)
            told = [getattr(chunk.choices[0].delta, "reasoning", None) for chunk in chunks]
            reasoning, arguments = "".join(filter(None, told)), "".join(c[2] for c in calls)
        else:
            (choice,) = reply.choices
            content, reason = choice.message.content, choice.finish_reason
            reasoning = getattr(choice.message, "reasoning", None) or ""
            calls = choice.message.tool_calls or []
            arguments = "".join(one.function.arguments for one in calls)
        assert not content and reason == "length"
        assert "7 times 7.".startswith(reasoning) and '{"a": 7}'.startswith(arguments)


def without_thoughts() -> dict[str, int]:
    """A bias against channels of thoughts: this model would never leave them."""
    backend = harmony_tokenizer()
    return {
        str(token): -100
        for word, token in backend.get_vocab().items()
        if word.startswith("a") and "analysis".startswith(word)
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "cube"}}], ids=str
)
def test_forced_calls(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    reply: Any = client.chat.completions.create(
        model="m",
        messages=QUESTION,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        logit_bias=without_thoughts(),
        stream=stream,
    )
    if stream:
        content, [[_, name, arguments]], reason = joined_calls(reply)
    else:
        (one,) = reply.choices
        content, reason = one.message.content or "", one.finish_reason
        (call,) = one.message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    assert content == "" and reason == "tool_calls"
    assert name in (["square", "cube"] if choice == "required" else ["cube"])
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_forced_calls_leave_room_for_thoughts(client: openai.OpenAI) -> None:
    """Which this model begins, where nothing speaks against it, and never ends."""
    bias = dict.fromkeys(without_thoughts(), 100)
    (choice,) = client.chat.completions.create(
        model="m",
        messages=QUESTION,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=20,
        logit_bias={**bias, str(IDS["<|end|>"]): -100},
    ).choices
    assert choice.message.reasoning and not choice.message.content  # type: ignore[attr-defined]
    assert choice.finish_reason == "length" and not choice.message.tool_calls


def test_a_schema_binds_the_final_message(client: openai.OpenAI) -> None:
    closed = {**SCHEMA, "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": closed}}
    settings: Any = {"model": "m", "messages": QUESTION, "response_format": wanted}
    settings |= {"logit_bias": without_thoughts(), "max_tokens": 100}
    (choice,) = client.chat.completions.create(**settings).choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    (choice,) = client.chat.completions.create(**settings, tools=TOOLS).choices
    calls = choice.message.tool_calls or []
    answers = [choice.message.content] if choice.message.content else []
    assert len(calls) + len(answers) > 0
    for text in (*answers, *(one.function.arguments for one in calls)):  # type: ignore[union-attr]
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_message_that_is_continued(client: openai.OpenAI) -> None:
    """The prompt ends within the final message."""
    told = [*QUESTION, {"role": "assistant", "content": "It is"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    (choice,) = ask(client, " 49.", messages=told, extra_body=extra).choices
    assert choice.message.content == " 49."


def test_the_conversation_as_the_model_reads_it(server: RunningServer) -> None:
    reply = server.request(
        "POST",
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [
                *QUESTION,
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning": "7 times 7.",
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "square", "arguments": '{"a": 7}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "49"},
            ],
            "tools": TOOLS,
            "reasoning_effort": "high",
            "max_tokens": 1,
            "return_token_ids": True,
        },
    )
    tokens = reply.json["prompt_token_ids"]
    prompt = server.request("POST", "/detokenize", {"tokens": tokens}).json["prompt"]
    assert "Reasoning: high<|end|>" in prompt and "type cube = " in prompt
    assert prompt.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>7 times 7.<|end|>"
        '<|start|>assistant to=functions.square<|channel|>commentary json<|message|>{"a": 7}'
        "<|call|>"
        '<|start|>functions.square to=assistant<|channel|>commentary<|message|>"49"<|end|>'
        "<|start|>assistant"
    )
    assert {IDS["<|start|>"], IDS["<|call|>"]} <= set(tokens)


def test_responses(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "square", "parameters": SCHEMA, "strict": True}]
    arguments: Any = {"model": "m", "input": "What is 7 squared?", "tools": tools}
    arguments |= {"reasoning": {"effort": "low"}, "extra_body": forced(THINKS + SAYS + CALLS)}
    whole = client.responses.create(**arguments)
    events: Any = list(client.responses.create(**arguments, stream=True))
    for output in (whole.output, events[-1].response.output):
        thought, message, call = output
        assert thought.type == "reasoning" and thought.content[0].text == "7 times 7."
        assert message.type == "message" and message.content[0].text == "I square it."
        assert (call.name, call.arguments) == ("square", '{"a": 7}')
    assert whole.status == "completed"
    told: Any = [{"role": "user", "content": "What is 7 squared?"}, *whole.output]
    told += [{"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "49"}]  # type: ignore[union-attr]
    arguments |= {"input": told, "extra_body": forced(ANSWERS)}
    assert client.responses.create(**arguments).output_text == "It is 49."


@pytest.mark.parametrize("stream", [False, True])
def test_messages(server: RunningServer, stream: bool) -> None:
    body = {"model": "m", "messages": QUESTION, "max_tokens": 200, "stream": stream}
    body |= {"tools": [{"name": "square", "input_schema": SCHEMA}]}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    body |= forced(THINKS + SAYS + CALLS, "<|call|>")
    reply = server.request("POST", "/v1/messages", body)
    assert reply.status == 200, reply.body
    if stream:
        events = [json.loads(one[6:]) for one in reply.body.decode().splitlines() if one[:1] == "d"]
        kinds = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
        assert kinds == ["thinking", "text", "tool_use"]
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        assert "".join(d.get("partial_json", "") for d in deltas) == '{"a": 7}'
        assert "".join(d.get("thinking", "") for d in deltas) == "7 times 7."
        (end,) = (e for e in events if e["type"] == "message_delta")
        assert end["delta"]["stop_reason"] == "tool_use"
        return
    thought, text, call = reply.json["content"]
    assert (thought["thinking"], text["text"]) == ("7 times 7.", "I square it.")
    assert (call["name"], call["input"]) == ("square", {"a": 7})
    assert reply.json["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "49"}
    told = [*QUESTION, {"role": "assistant", "content": reply.json["content"]}]
    told.append({"role": "user", "content": [result]})
    body |= {"messages": told, **forced(ANSWERS)}
    again = server.request("POST", "/v1/messages", body)
    assert [one["text"] for one in again.json["content"]] == ["It is 49."], again.body
    assert again.json["stop_reason"] == "end_turn"


def test_effort_in_messages(server: RunningServer) -> None:
    """The template prints it: a longer word is a longer prompt."""
    body = {"model": "m", "messages": QUESTION}
    sizes = []
    for effort in ("low", "l" * 40):
        asked = {**body, "output_config": {"effort": effort}}
        reply = server.request("POST", "/v1/messages/count_tokens", asked)
        assert reply.status == 200, reply.body
        sizes.append(reply.json["input_tokens"])
    assert sizes[1] > sizes[0] + 5


def test_calls_end_replies_that_the_configuration_lets_go_on(tmp_path: Path) -> None:
    """Models that others have trained further may name one end only."""
    save_model(tmp_path, ("<|return|>",))
    with LLM(str(tmp_path), num_threads=1, kv_cache_memory_bytes="16MiB") as llm:
        session = llm._session
        preparation = Preparation.of(PreparationSettings.of(session, ServingOptions()), session)
        asked = {"messages": QUESTION, "tools": TOOLS, "stop_token_ids": [5]}
        made = preparation.prepare_messages(ChatBody(**asked))
        assert made.sampling.stop_token_ids == [5, IDS["<|call|>"]]
        assert not made.sampling.skip_special_tokens
        made = preparation.prepare_messages(ChatBody(**asked, ignore_eos=True))
        assert made.sampling.stop_token_ids == [5]
