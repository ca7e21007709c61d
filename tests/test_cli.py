"""The `quire` command as a user meets it: help, one-line errors, streaming, and the chat."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import quire
from quire.cli import BENCHMARKS, main, run_chat
from quire.config.embedded import find_embedded_model
from quire.protocol.errors import RequestError
from quire.protocol.sampling import RequestOutputKind, SamplingParams

ROOT = Path(__file__).resolve().parent.parent

needs_embedded_model = pytest.mark.skipif(
    find_embedded_model() is None, reason="the embedded model is not installed (`quire pull`)"
)


def run(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire", *words],
        cwd=ROOT,
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
    for command in ("generate", "chat", "pull", "bench"):
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
        (["chat", "--max-model-len", "0"], "max_model_len must be at least 1"),
        (["sing"], "argument COMMAND: invalid choice: 'sing'"),
        (["bench", "speed"], "argument BENCHMARK: invalid choice: 'speed'"),
    ],
)
def test_mistakes_end_in_one_line(words: list[str], message: str) -> None:
    """Exit status 2, one line, no traceback."""
    result = run(*words)
    assert result.returncode == 2
    assert result.stderr.startswith("quire: error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout


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

    def stream_chat(
        self, messages: list[dict[str, str]], params: SamplingParams
    ) -> Generator[Any, None, None]:
        assert params.output_kind is RequestOutputKind.DELTA
        self.conversations.append([dict(message) for message in messages])
        try:
            for word in self.replies.pop(0).split():
                if word == "fail":
                    raise RequestError("prompt is too long.")
                if word == "^C":
                    signal.raise_signal(signal.SIGINT)
                yield SimpleNamespace(outputs=[SimpleNamespace(text=word + " ")])
        finally:
            self.closed += 1


def chat(
    model: ScriptedModel,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    system: str | None = None,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    assert run_chat(model, params, system, interactive=False) == 0  # type: ignore[arg-type]


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
    """/clear and /system start afresh, /exit ends, others are explained, paths are messages."""
    model = ScriptedModel("one", "two", "three")
    lines = ["first", "/clear", "second", "/system Rhyme.", "/help", "/etc/hosts?", "/exit", "no"]
    chat(model, lines, monkeypatch)
    assert model.conversations == [
        [{"role": "user", "content": "first"}],
        [{"role": "user", "content": "second"}],
        [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "/etc/hosts?"}],
    ]
    assert "/clear forgets" in capsys.readouterr().out


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


# The real thing.


@needs_embedded_model
def test_generate_streams_what_the_api_generates() -> None:
    """One prompt streams; several print prompt and text; both are the same greedy tokens."""
    flags = ["--temperature", "0", "--max-tokens", "8", "--max-model-len", "256"]
    prompts = ["The capital of France is", "One, two, three,"]
    one = run("generate", *flags, text=prompts[0])
    many = run("generate", *prompts, *flags)
    assert one.returncode == many.returncode == 0, one.stderr + many.stderr
    assert one.stdout.strip() and "Traceback" not in one.stderr
    assert many.stdout.startswith(prompts[0] + one.stdout[:-1])
    assert prompts[1] in many.stdout


@needs_embedded_model
def test_chat_works_through_a_pipe() -> None:
    """Scripts talk to the chat too."""
    flags = ["--temperature", "0", "--max-tokens", "6", "--max-model-len", "256"]
    result = run("chat", *flags, text="Say hello.\n/clear\nSay hello.\n")
    assert result.returncode == 0, result.stderr
    half = len(result.stdout) // 2
    assert result.stdout.strip() and result.stdout[:half] == result.stdout[half:]
