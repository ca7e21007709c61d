"""The `quire` command as a user meets it: help, one-line errors, streaming, and the chat."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

import quire
from quire.cli import BENCHMARKS, main
from quire.config.embedded import find_embedded_model
from quire.protocol.errors import RequestError
from quire.terminal import run_chat
from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parent.parent
# One thread: waiting for each other at every operator, two are slow on busy cores.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}

needs_embedded_model = pytest.mark.skipif(
    find_embedded_model() is None, reason="the embedded model is not installed (`quire pull`)"
)


def run(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire", *words],
        cwd=ROOT,
        env=ENVIRONMENT,
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
    )


def output_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints when it only answers."""
    try:
        assert main(words) == 0
    except SystemExit as ended:
        assert ended.code == 0
    return capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """What people paste into bug reports."""
    assert output_of(capsys, "--version") == f"quire {quire.__version__}\n"


def test_help_lists_commands_and_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    """A newcomer finds every command; no command at all is a question for help."""
    text = output_of(capsys, "--help")
    assert text == output_of(capsys)
    for command in ("generate", "chat", "complete", "run-batch", "pull", "bench"):
        assert command in text
        assert "usage: quire " + command in output_of(capsys, command, "--help")
    for name, summary in BENCHMARKS.items():
        shown = " ".join(output_of(capsys, "bench").split())
        assert name in shown and summary in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "x", "--block-size", "3"], "block_size must be a power of two"),
        (["generate", "x", "--temperature", "nan"], "temperature must be finite, got nan"),
        (["generate", "x", "--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
        (["generate", "x", "--n", "0"], "n must be from 1 to"),
        (["generate", "x", "--model", "./no/such/folder"], "./no/such/folder"),
        (["pull", "./no/such/folder"], "./no/such/folder"),
        (["generate", "x", "--device", "cuda"], "device='cuda' was not found"),
        (["generate", "x", "-n", "2"], "unknown flag -n. Did you mean --n?"),
        (["generate", "x", "--chat-template", "t"], "--chat-template is of no use to"),
        (["generate", "x", "--max-tokens", "3", "y"], "unexpected argument 'y'"),
        (["generate", "x", ""], "prompt is empty"),
        (["generate"], "prompt is empty"),
        (["chat", "--max-model-len", "0"], "max_model_len must be at least 1"),
        (["chat", "--n", "2"], "--n is of no use to `quire chat`"),
        (["sing"], "unknown command 'sing'. There are generate, chat, serve"),
        (["serv"], "unknown command 'serv'. Did you mean `quire serve`?"),
        (["run", "x"], "unknown command 'run'. Did you mean `quire chat`?"),
        (["bench", "run"], "unknown benchmark 'run'. There are throughput, latency"),
        (["bench", "memroy"], "unknown benchmark 'memroy'. Did you mean `quire bench memory`?"),
        (["generate", "x", "--model", "llama3.2:1b"], "'meta-llama/Llama-3.2-1B-Instruct'"),
        (["generate", "x", "--log-level", "loud"], "log_level must be one of 'DEBUG', 'INFO'"),
    ],
)
def test_mistakes_end_in_one_line(words: list[str], message: str) -> None:
    """Exit status 2, one line, no traceback."""
    result = run(*words)
    assert result.returncode == 2
    assert result.stderr.startswith("quire: error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_standard_input_may_be_closed(command: str) -> None:
    """As daemons and cron close it."""
    words = ["sh", "-c", f'exec "$0" -m quire {command} <&-', sys.executable]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.startswith("quire: error: standard input is closed")
    assert result.stderr.count("\n") == 1


def test_lazy_names_are_complete() -> None:
    """Every public name has a home; unknown ones raise as usual."""
    assert set(quire._HOMES) == set(quire.__all__) - {"__version__"}
    assert dir(quire) == sorted(quire.__all__)
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = quire.NoSuchName


# The chat's control flow, with a model that says what it is told to: only so can Ctrl-C be timed.


class ScriptedModel:
    """Streams replies word by word. The word ^C sends an interrupt, `fail` refuses the request."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.conversations: list[list[dict[str, str]]] = []
        self.closed = 0

    def stream(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        self.conversations.append([dict(message) for message in messages])
        try:
            for word in self.replies.pop(0).split():
                if word == "fail":
                    raise RequestError("prompt is too long.")
                if word == "^C":
                    signal.raise_signal(signal.SIGINT)
                yield word + " "
        finally:
            self.closed += 1


def chat(
    model: ScriptedModel,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    system: str | None = None,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    assert run_chat(model.stream, system, interactive=False) == 0


def test_chat_keeps_the_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model sees the whole conversation; a pipe gets the replies and nothing else."""
    model = ScriptedModel("hello you", "fine")
    chat(model, ["hi", "", "how are you?"], monkeypatch, system="Be kind.")
    assert model.conversations[1] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello you "},
        {"role": "user", "content": "how are you?"},
    ]
    assert capsys.readouterr().out == "hello you \nfine \n"


def test_chat_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """/clear and /system start afresh, /exit ends, others are explained, paths are messages.

    A pipe gets none of the explanations.
    """
    model = ScriptedModel("one", "two", "three")
    lines = ["first", "/clear", "second", "/system Rhyme.", "/help", "/etc/hosts?", "/exit", "no"]
    chat(model, lines, monkeypatch)
    assert model.conversations == [
        [{"role": "user", "content": "first"}],
        [{"role": "user", "content": "second"}],
        [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "/etc/hosts?"}],
    ]
    captured = capsys.readouterr()
    assert captured.out == "one \ntwo \nthree \n" and "/clear forgets" in captured.err


def test_interrupt_stops_the_reply_and_not_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came so far stays in the history, the request is given up, Ctrl-C works again."""
    handler = signal.getsignal(signal.SIGINT)
    model = ScriptedModel("a b ^C never shown", "still here")
    chat(model, ["go", "and?"], monkeypatch)
    assert model.conversations[1][1] == {"role": "assistant", "content": "a b ^C "}
    assert model.closed == 2
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_refused_message_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversation that outgrew the context can be cleared instead of lost."""
    model = ScriptedModel("fail", "fine")
    chat(model, ["too long", "short"], monkeypatch)
    assert model.conversations[1] == [{"role": "user", "content": "short"}]
    captured = capsys.readouterr()
    assert captured.out == "fine \n" and "prompt is too long." in captured.err


def test_a_model_without_a_chat_template_cannot_chat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so before the first message, not after each."""
    save_tiny(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", "--model", str(tmp_path), "--kv-cache-memory-bytes", "8MiB"]) == 2
    captured = capsys.readouterr()
    assert "has no chat template" in captured.err and "--chat-template" in captured.err
    assert not captured.out


# The real thing, in as little memory as it takes.

SMALL = ["--max-model-len", "256", "--kv-cache-memory-bytes", "32MiB"]


@needs_embedded_model
def test_generate_streams_what_the_api_generates() -> None:
    """One prompt streams; several print prompt and text; both are the same greedy tokens.

    What the engine says at start-up does not reach standard output.
    """
    flags = ["--temperature", "0", "--max-tokens", "8", *SMALL]
    prompts = ["The capital of France is", "One, two, three,"]
    one = run("generate", *flags, text=prompts[0])
    many = run("generate", *prompts, *flags)
    assert one.returncode == many.returncode == 0, one.stderr + many.stderr
    assert one.stdout.strip() and "Traceback" not in one.stderr
    first, second, third = one.stderr.splitlines()
    assert first.startswith("quire: model: SmolLM2-135M-Instruct on ")
    assert second.startswith("quire: KV cache: ") and third.startswith("quire: ready in ")
    assert "quire:" not in one.stdout
    assert many.stdout.startswith(prompts[0] + one.stdout[:-1])
    assert prompts[1] in many.stdout


@needs_embedded_model
def test_warnings_take_one_line() -> None:
    """Each is said once, and not with a line of Quire's code."""
    result = run("generate", "Hi", "--temperature", "0.005", "--max-tokens", "1", *SMALL)
    warned = [line for line in result.stderr.splitlines() if "temperature" in line]
    assert warned == [
        "quire: warning: temperature=0.005 is raised to 0.01: smaller values overflow; use 0 for "
        "greedy sampling."
    ]


@needs_embedded_model
def test_seed_repeats_and_no_seed_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    """Who asks twice wants to see something else, unless they say otherwise."""
    words = ["generate", "Once upon a time", "--max-tokens", "16", "--ignore-eos", *SMALL]
    words += ["--temperature", "1"]
    seeded = {output_of(capsys, *words, "--seed", "7") for _ in range(2)}
    assert len(seeded) == 1
    assert output_of(capsys, *words) != output_of(capsys, *words)


@needs_embedded_model
@pytest.mark.parametrize(
    ("stop", "status"),
    [
        (lambda process: process.stdout.close(), 1),
        (lambda process: process.send_signal(signal.SIGINT), 130),
    ],
    ids=["reader leaves", "Ctrl-C"],
)
def test_generating_can_be_cut_short(
    stop: Callable[[subprocess.Popen[bytes]], None], status: int
) -> None:
    """`| head` and Ctrl-C end the command without a traceback."""
    words = ["generate", "1 2 3 4", "--ignore-eos", "--max-tokens", "200", "--max-model-len", "256"]
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", *words],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)
    stop(process)
    errors = process.stderr.read().decode()
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=120) == status
    assert "Traceback" not in errors and "Exception ignored" not in errors


@needs_embedded_model
def test_chat_works_through_a_pipe() -> None:
    """Scripts talk to the chat too. In float32, where a cached prompt cannot change the answer."""
    flags = ["--temperature", "0", "--max-tokens", "6", "--dtype", "float32", *SMALL]
    result = run("chat", *flags, text="Say hello.\n/clear\nSay hello.\n")
    assert result.returncode == 0, result.stderr
    half = len(result.stdout) // 2
    assert result.stdout.strip() and result.stdout[:half] == result.stdout[half:]


@needs_embedded_model
def test_chat_works_in_a_terminal() -> None:
    """It says how to leave, prompts for each message, and Ctrl-D leaves on a line of its own."""
    mine, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "chat", "--temperature", "0", "--max-tokens", "6", *SMALL],
        cwd=ROOT,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=ENVIRONMENT | {"TERM": "dumb"},
    )
    os.close(terminal)
    opening = read_until(mine, b"\n> ")
    os.write(mine, b"Say hello.\n")
    reply = read_until(mine, b"\n> ")
    os.write(mine, b"\x04")
    ending = read_until(mine, None)
    os.close(mine)
    assert process.wait(timeout=120) == 0
    assert b"Ctrl-D ends the chat" in opening and b"/clear forgets" in opening
    echo, text = reply.split(b"\n", 1)
    assert echo.strip() == b"Say hello." and text.removesuffix(b"\n> ").strip()
    assert ending.endswith(b"\n")


def read_until(terminal: int, end: bytes | None) -> bytes:
    """What a terminal shows up to `end`, or until its program has gone."""
    shown = b""
    while end is None or not shown.endswith(end):
        try:
            shown += os.read(terminal, 1024).replace(b"\r", b"")
        except OSError:
            assert end is None, shown
            return shown
    return shown
