from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from quire import LLM
from tests.server.running import ENGINE, OnLoop, RunningServer
from tests.tiny import save_tiny


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """One server with the embedded model for all tests that leave it running."""
    running = RunningServer.start(*ENGINE)
    assert running.url, "".join(running.lines)
    yield running
    assert running.stop() == 0, "".join(running.lines)


@pytest.fixture(scope="session")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="session")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The same model in this process: what the server should answer."""
    with LLM(
        dtype="float32", num_threads=1, max_model_len=1024, kv_cache_memory_bytes="128MiB"
    ) as engine:
        yield engine


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def on_loop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OnLoop:
    """Tests that ask for this run on each event loop that may serve."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop", reason="uvloop is not installed")
        return OnLoop(request.param)
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "uvloop.py").write_text("raise ModuleNotFoundError\n", encoding="utf-8")
    paths = filter(None, [str(hidden), os.environ.get("PYTHONPATH")])
    return OnLoop(request.param, {"PYTHONPATH": os.pathsep.join(paths)})


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers at once and has a chat template: the server is what takes the time."""
    folder = tmp_path_factory.mktemp("tiny")
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    save_tiny(folder, tokenizer_config={"chat_template": template}, max_position_embeddings=2048)
    return folder
