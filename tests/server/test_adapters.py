"""Adapters of a real server, by the official clients, next to peft."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import peft
import pytest
from transformers import PreTrainedModel

from tests.adapters import ATTENTION, MLP, make_adapter
from tests.server.running import ADMIN, TINY, RunningServer
from tests.tiny import is_greedy, save_tiny, text_ids

PROMPT = "the quick brown fox"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
NAMES = ("sql", "fr", "lazy", "late")


@dataclass
class Served:
    server: RunningServer
    folder: Path
    base: PreTrainedModel
    models: dict[str, peft.PeftModel]

    @property
    def client(self) -> openai.OpenAI:
        return self.server.client()

    def admin(self, path: str, **body: Any) -> Any:
        return self.server.request("POST", path, body, ADMIN)

    def makes(self, name: str, **settings: Any) -> list[int]:
        """What a completion of a name has for tokens."""
        reply = self.client.completions.create(
            model=name,
            prompt=text_ids(PROMPT),
            max_tokens=8,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True, **settings},
        )
        assert reply.model == name
        ids: list[int] = reply.choices[0].model_extra["token_ids"]  # type: ignore[index]
        return ids

    def assert_is(self, name: str, model: PreTrainedModel | peft.PeftModel) -> None:
        assert is_greedy(model, text_ids(PROMPT), self.makes(name))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two API processes, so that what one is told the other has to know."""
    folder = tmp_path_factory.mktemp("adapters")
    base = save_tiny(folder / "base", tokenizer_config={"chat_template": TEMPLATE})
    config: dict[str, Any] = {"target_modules": [*ATTENTION, *MLP], "lora_alpha": 32}
    (folder / "many").mkdir()
    places = {"lazy": folder / "many" / "lazy"}
    models = {
        name: make_adapter(base, places.get(name, folder / name), seed, r=2 + seed, **config)
        for seed, name in enumerate(NAMES)
    }
    (folder / "many" / "no_adapter").mkdir()
    modules = [
        f"sql={folder / 'sql'}",
        f'{{"name": "fr", "path": "{folder / "fr"}", "base_model_name": "older"}}',
    ]
    server = RunningServer.start(
        *("--model", str(folder / "base"), "--served-model-name", "base", "--dtype", "float32"),
        *("--lora-modules", *modules, "--lora-folder", str(folder / "many")),
        *("--allow-runtime-lora", "--api-server-count", "2", "--max-loras", "2", *TINY),
    )
    assert server.url, "".join(server.lines)
    yield Served(server, folder, base, models)
    assert server.stop() == 0, "".join(server.lines)


def test_models_by_name(served: Served) -> None:
    """Adapters stand in the list behind the model, which is their parent."""
    listed = {one.id: one for one in served.client.models.list().data}
    assert list(listed)[:3] == ["base", "sql", "fr"]
    assert "lazy" in listed
    assert "no_adapter" not in listed
    roots = {name: (one.model_extra or {}) for name, one in listed.items()}
    assert roots["base"]["parent"] is None
    assert roots["sql"] | {"parent": "base", "root": str(served.folder / "sql")} == roots["sql"]
    assert roots["fr"]["parent"] == "older"
    assert roots["lazy"]["root"] == str(served.folder / "many" / "lazy")
    assert served.client.models.retrieve("lazy").id == "lazy"


@pytest.mark.parametrize("name", ["base", "sql", "fr", "lazy"])
def test_completions_are_those_of_peft(name: str, served: Served) -> None:
    """Whichever process answers, and whether the adapter was there from the start or is loaded when
    it is first asked for."""
    for _ in range(2):
        served.assert_is(name, served.models.get(name, served.base))


def test_every_protocol(served: Served) -> None:
    """Each route takes an adapter's name for `model`, answers with it and computes with it."""
    client, url = served.client, served.server.url
    messages: Any = [{"role": "user", "content": PROMPT}]
    settings: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    texts: dict[str, list[str]] = {}
    for name in ("base", "sql"):
        chat = client.chat.completions.create(
            model=name, messages=messages, max_tokens=8, **settings
        )
        stream = client.chat.completions.create(
            model=name, messages=messages, max_tokens=8, stream=True, **settings
        )
        chunks = list(stream)
        assert {chunk.model for chunk in chunks} == {name} == {chat.model}
        response = client.responses.create(
            model=name, input=messages, max_output_tokens=16, temperature=0
        )
        assert response.model == name
        speaker = anthropic.Anthropic(api_key="none", base_url=url, max_retries=0)
        message = speaker.messages.create(
            model=name, messages=messages, max_tokens=8, extra_body={"temperature": 0}
        )
        assert message.model == name
        text = chat.choices[0].message.content or ""
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        texts[name] = [text, response.output_text, getattr(message.content[0], "text", "")]
    for with_base, with_adapter in zip(texts["base"], texts["sql"], strict=True):
        assert with_base != with_adapter
    tokens = served.server.request("POST", "/tokenize", {"model": "sql", "prompt": PROMPT}).json
    assert tokens["tokens"] == text_ids(PROMPT)
    vectors = [
        client.embeddings.create(model=name, input=PROMPT, encoding_format="float")
        for name in ("base", "sql", "sql")
    ]
    base, sql, again = (np.array(one.data[0].embedding) for one in vectors)
    np.testing.assert_allclose(sql, again, atol=1e-6)
    assert vectors[1].model == "sql"
    assert base @ sql < 0.99


@pytest.mark.parametrize(
    "name",
    ["none", "no_adapter", "../sql", "many/lazy", "/etc", "..", ".", "lazy/", "lazy\0", "x" * 5000],
)
def test_unknown_names_are_404(name: str, served: Served) -> None:
    """Names are looked up in the folder, and never lead out of it."""
    known = "this server has 'base', .*, and adapters of a folder, see /v1/models"
    with pytest.raises(openai.NotFoundError, match=f"does not exist here; {known}"):
        served.makes(name)
    reply = served.server.request("POST", "/tokenize", {"model": name, "prompt": PROMPT})
    assert reply.status == 404


def test_load_and_unload(served: Served) -> None:
    """vLLM's bodies and answers; both API processes know at once."""
    path = str(served.folder / "late")
    reply = served.admin("/v1/load_lora_adapter", lora_name="new", lora_path=path)
    assert (reply.status, reply.body) == (
        200,
        b"Success: LoRA adapter 'new' added successfully.",
    )
    for _ in range(4):
        assert "new" in [one.id for one in served.client.models.list().data]
        served.assert_is("new", served.models["late"])
    again = served.admin("/v1/load_lora_adapter", lora_name="new", lora_path=path)
    assert again.status == 400
    assert "has already been loaded" in again.error["message"]
    reply = served.admin("/v1/unload_lora_adapter", lora_name="new")
    assert (reply.status, reply.body) == (
        200,
        b"Success: LoRA adapter 'new' removed successfully.",
    )
    for _ in range(4):
        assert "new" not in [one.id for one in served.client.models.list().data]
        with pytest.raises(openai.NotFoundError):
            served.makes("new")
    reply = served.admin("/v1/unload_lora_adapter", lora_name="new")
    assert reply.status == 404
    assert "cannot be found" in reply.error["message"]


def test_what_the_folder_has_is_served_on(served: Served) -> None:
    served.assert_is("lazy", served.models["lazy"])
    reply = served.admin("/v1/unload_lora_adapter", lora_name="lazy")
    assert reply.status == 200 and b"is loaded again when a request names it" in reply.body
    served.assert_is("lazy", served.models["lazy"])


def test_new_weights_under_an_old_name(served: Served) -> None:
    """Nothing of the old weights is used again: no block of the prefix cache, and no process has
    them."""
    place = served.folder / "changing"
    shutil.copytree(served.folder / "sql", place)
    body = {"lora_name": "changing", "lora_path": str(place)}
    assert served.admin("/v1/load_lora_adapter", **body).status == 200
    served.assert_is("changing", served.models["sql"])
    shutil.rmtree(place)
    shutil.copytree(served.folder / "late", place)
    assert served.admin("/v1/load_lora_adapter", **body, load_inplace=True).status == 200
    for _ in range(3):
        served.assert_is("changing", served.models["late"])
    assert served.admin("/v1/unload_lora_adapter", lora_name="changing").status == 200


def test_a_module_of_the_start_can_be_unloaded(served: Served) -> None:
    assert served.admin("/v1/unload_lora_adapter", lora_name="fr").status == 200
    for _ in range(4):
        with pytest.raises(openai.NotFoundError):
            served.makes("fr")
    path = str(served.folder / "fr")
    assert served.admin("/v1/load_lora_adapter", lora_name="fr", lora_path=path).status == 200
    served.assert_is("fr", served.models["fr"])


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "Both 'lora_name' and 'lora_path' must be provided"),
        ({"lora_name": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided"),
        ({"lora_name": "x", "lora_path": "/none"}, 404, "No adapter found for 'x'"),
        ({"lora_name": "x", "lora_path": "~none/x"}, 404, "No adapter found for 'x'"),
        ({"lora_name": "x", "lora_path": "\0"}, 404, "No adapter found for 'x'"),
        ({"lora_name": "x", "lora_path": "/"}, 400, "adapter_config.json is missing"),
        ({"lora_name": "base", "lora_path": "/"}, 400, "the model's own name"),
        ({"lora_name": "x" * 300, "lora_path": "/"}, 400, "has 300 characters"),
        ({"lora_name": "x\n", "lora_path": "/"}, 400, "lora_name must be a name"),
        ({"lora_name": ["x"], "lora_path": "/"}, 400, "lora_name"),
    ],
)
def test_what_cannot_be_loaded(
    body: dict[str, Any], status: int, words: str, served: Served
) -> None:
    reply = served.admin("/v1/load_lora_adapter", **body)
    assert reply.status == status
    assert words in reply.error["message"]


def test_adapters_that_do_not_fit(served: Served) -> None:
    """Their own requests get an error that names modules or ranks; others go on."""
    bad = served.folder / "bad"
    other = save_tiny(served.folder / "other", hidden_size=32, num_attention_heads=2)
    make_adapter(other, bad, target_modules=["q_proj"])
    large = served.folder / "many" / "large"
    make_adapter(served.base, large, target_modules=["q_proj"], r=17)
    reply = served.admin("/v1/load_lora_adapter", lora_name="bad", lora_path=str(bad))
    assert reply.status == 400
    assert "q_proj" in reply.error["message"]
    assert "bad" not in [one.id for one in served.client.models.list().data]
    with pytest.raises(openai.BadRequestError, match="rank 17, but max_lora_rank is 16"):
        served.makes("large")
    served.assert_is("sql", served.models["sql"])


def test_only_the_admin_loads(served: Served) -> None:
    body = {"lora_name": "x", "lora_path": "/"}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert served.server.request("POST", path, body).status == 401


def test_many_at_once(served: Served) -> None:
    """More adapters than there are places for at once, in one batch with the base."""
    from concurrent.futures import ThreadPoolExecutor

    wanted = ["base", "sql", "fr", "lazy"] * 3
    with ThreadPoolExecutor(len(wanted)) as threads:
        made = list(threads.map(served.makes, wanted))
    for name, ids in zip(wanted, made, strict=True):
        assert is_greedy(served.models.get(name, served.base), text_ids(PROMPT), ids)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora-modules", "sql"], "lora_modules must be name=folder"),
        (["--lora-modules", "sql=/none"], "'/none' (of 'sql') is not the folder of an adapter"),
        (["--lora-modules", '{"name": "x"}'], "lora_modules must be name=folder"),
        (["--lora-folder", "/none"], "lora_folder '/none' is not a folder"),
        (["--allow-runtime-lora"], "allow_runtime_lora needs admin_key"),
    ],
)
def test_options(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before a model is loaded."""
    from quire.cli import main

    assert main(["serve", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_module_that_does_not_fit_ends_the_start(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", hidden_size=32, num_attention_heads=2)
    make_adapter(base, tmp_path / "large", target_modules=["q_proj"], r=17)
    server = RunningServer.start(
        *("--model", str(tmp_path / "base"), "--max-lora-rank", "8"),
        *("--lora-modules", f"large={tmp_path / 'large'}", *TINY),
    )
    assert not server.url
    text = "".join(server.lines)
    assert "rank 17, but max_lora_rank is 8" in text, text
