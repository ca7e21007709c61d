"""Bodies of every POST route, through the real application on a tiny model, without a socket."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from quire import AsyncLLM
from quire.client.run_batch import post_asgi
from quire.config.server import ServerOptions
from quire.server.app import build_app
from quire.server.state import ServerState
from tests.fuzz.mutations import Mutator
from tests.fuzz.target import Target
from tests.server.hostile import VALID
from tests.tiny import save_tiny

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
STATUSES = {200, 400, 404, 408, 413}
ADMIN = "/admin/"  # these need a key, and are asked over a socket by tests/server/test_fuzz.py
ROUTES = tuple(path for path in VALID if not path.startswith(ADMIN))


class Bodies(Target):
    """The first line of an input is the path, the rest the body."""

    name = "bodies"
    tokens = tuple(
        word.encode()
        for word in (
            *("prompt", "messages", "input", "max_tokens", "n", "stream", "logprobs", "stop"),
            *("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "tools", "text"),
            *("tool_choice", "response_format", "structured_outputs", "guided_json", "user"),
            *("guided_regex", "guided_choice", "use_beam_search", "prompt_logprobs", "echo"),
            *("json_schema", "json_object", "required", "auto", "assistant", "tool", "system"),
            *("repetition_penalty", "temperature", "seed", "min_tokens", "suffix", "content"),
            *("truncate_prompt_tokens", "encoding_format", "base64", "dimensions", "tokens"),
        )
    )

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        save_tiny(Path(self._folder.name), tokenizer_config={"chat_template": TEMPLATE})
        self._start()

    def _start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._llm = self._loop.run_until_complete(self._start_engine(self._folder.name))
        self._app = build_app(ServerState(self._llm, ServerOptions()))

    @staticmethod
    async def _start_engine(model: str) -> AsyncLLM:
        # Limits as servers have them, but small: much work for one body is no fault, but slow.
        return AsyncLLM(
            model,
            num_threads=1,
            kv_cache_memory_bytes="32MiB",
            max_model_len=48,
            max_num_seqs=16,
            max_num_queued_reqs=32,
        )

    def check(self, data: bytes) -> None:
        line, _, body = data.partition(b"\n")
        path = line.decode("latin-1")
        if path not in VALID:
            return
        self._loop.run_until_complete(self._ask(path, body))

    async def _ask(self, path: str, body: bytes) -> None:
        answer = await post_asgi(self._app, path, body)
        status, reply = answer.status, answer.body
        assert status in STATUSES, (status, reply[:500])
        if status != 200:
            message = json.loads(reply)["error"]["message"]
            assert message and len(message) < 3000
        elif not reply.startswith((b"data: ", b"event: ")):
            json.loads(reply, parse_constant=_refuse_constant)
        assert self._llm.num_open == 0

    def mutate(self, corpus: Sequence[bytes], mutator: Mutator) -> bytes:
        line, _, body = mutator.chance.choice(corpus).partition(b"\n")
        if mutator.chance.random() < 0.1:
            line = mutator.chance.choice(ROUTES).encode()
        if mutator.chance.random() < 0.05:
            return line + b"\n" + mutator.mutate([body])
        return line + b"\n" + mutator.mutate_json(body, corpus)

    def recover(self) -> None:
        self._stop()
        self._start()

    def close(self) -> None:
        self._stop()
        self._folder.cleanup()

    def _stop(self) -> None:
        self._llm.shutdown()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()


def _refuse_constant(text: str) -> None:
    raise AssertionError(f"a reply holds {text}, which is no JSON")
