"""Grammars that llguidance would compile for ever, or die of: in a process of their own."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.config.structured import GrammarSettings
from quire.engine.structured_output.compiler import NUM_AT_ONCE, GrammarCompiler
from quire.engine.structured_output.grammar_source import Vocabulary
from quire.engine.structured_output.sandbox import MODULE, PROGRAM, Case, Sandbox, StartSandbox
from quire.protocol.codec import line
from quire.protocol.errors import EngineDeadError, OverloadedError, RequestError
from quire.protocol.structured import StructuredOutputs
from tests.models.reference import VOCAB
from tests.tiny import END_ID, ascii_tokenizer

pytest.importorskip("llguidance", reason="llguidance is not installed")


def endless(title: str = "") -> StructuredOutputs:
    """llguidance looks at every remainder of the division before it has made a grammar."""
    return StructuredOutputs(json={"title": title, "type": "integer", "multipleOf": 99999989})


def vocabulary() -> Vocabulary:
    return Vocabulary(ascii_tokenizer().to_str(), VOCAB, (END_ID,))


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(vocabulary(), GrammarSettings())
    yield made
    made.close()


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(GrammarSettings())
    made.set_vocabulary(vocabulary)
    yield made
    made.shutdown()


def children_of(pid: int) -> list[int]:
    """Empty also where the system does not tell (no /proc)."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for threads_own in found for child in threads_own.read_text().split()]


def test_an_endless_grammar_ends_and_leaves_nothing(sandbox: Sandbox) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.json takes more than 0\.7 s"):
        sandbox.grammar_text(endless())
    assert not children_of(sandbox.pid)
    assert "a" in sandbox.grammar_text(StructuredOutputs(regex="a"))


LIMITED = """
import sys
from quire.config.structured import GrammarSettings
from quire.engine.structured_output import sandbox_process
from quire.engine.structured_output.grammar_source import Vocabulary
from quire.engine.structured_output.sandbox import Case, StartSandbox
from quire.protocol.structured import StructuredOutputs
vocabulary = Vocabulary(sys.stdin.read(), {size}, ({end},))
process = sandbox_process.SandboxProcess(StartSandbox(vocabulary, GrammarSettings()))
case = Case(7, StructuredOutputs(choice=["xy" * 40_000]))
for extra in (1 << 20, 1 << 30):
    status = open("/proc/self/status").read()
    used = int(status.split("VmSize:")[1].split()[0]) << 10
    sandbox_process.MAX_BYTES = used + sandbox_process.STACK_BYTES + extra
    pipe, fork = process._fork(case)
    fork.written += open(pipe, "rb").read()
    print(fork.verdict().refusal)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_grammar_that_takes_too_much_memory() -> None:
    """With a limit so low that it is reached before the clock ends the grammar."""
    command = [sys.executable, "-c", LIMITED.format(size=VOCAB, end=END_ID)]
    given = vocabulary().tokenizer_json
    ended = subprocess.run(command, input=given, capture_output=True, text=True)
    refused, accepted = ended.stdout.splitlines()
    assert refused.startswith("structured_outputs.choice takes more than the memory")
    assert "memory" not in accepted


def test_an_engine_that_ends_before_it_gave_an_order() -> None:
    command = [sys.executable, "-c", PROGRAM.format(path=sys.path, module=MODULE)]
    ended = subprocess.run(command, input=b"{", capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_an_engine_that_ends_before_it_has_an_answer() -> None:
    command = [sys.executable, "-c", PROGRAM.format(path=sys.path, module=MODULE)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    orders = StartSandbox(vocabulary(), GrammarSettings()), Case(0, StructuredOutputs(regex="a"))
    process.stdin.write(b"".join(line(order) for order in orders))
    process.stdin.flush()
    assert process.wait(60) == 0
    assert process.stderr.read() == b""
    process.stdin.close()
    process.stderr.close()


@pytest.mark.parametrize("said", ["[{", "hello\n"])
def test_an_answer_that_is_cut_off(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was ended while it wrote, or something else in it prints."""
    program = f"import sys; [input() for _ in range(2)]; sys.stdout.write({said!r})"
    program = program.replace("{", "{{") + "  # {path} {module}"
    monkeypatch.setattr("quire.engine.structured_output.sandbox.PROGRAM", program)
    sandbox = Sandbox(vocabulary(), GrammarSettings())
    for grammar in ("a", "b"):
        with pytest.raises(OverloadedError, match="try again"):
            sandbox.grammar_text(StructuredOutputs(regex=grammar))
    sandbox.close()


def test_a_path_with_what_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere"), "/b\udcff\n{'", None])
    sandbox = Sandbox(vocabulary(), GrammarSettings())
    assert "a" in sandbox.grammar_text(StructuredOutputs(regex="a"))
    sandbox.close()


def test_a_program_that_ignores_signals() -> None:
    """As some do so that they need not wait for processes."""
    ignored = (signal.SIGCHLD, signal.SIGALRM)
    before = [signal.signal(one, signal.SIG_IGN) for one in ignored]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        sandbox = Sandbox(vocabulary(), GrammarSettings())
        assert "a" in sandbox.grammar_text(StructuredOutputs(regex="a"))
        with pytest.raises(RequestError, match="takes more than"):
            sandbox.grammar_text(endless())
        sandbox.close()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        for one, handler in zip(ignored, before, strict=True):
            signal.signal(one, handler)


def test_a_process_that_cannot_be_started(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(OverloadedError, match="cannot be started"):
            compiler.compile(StructuredOutputs(regex="a")).result()
    assert compiler.compile(StructuredOutputs(regex="b")).result().starts


def test_a_compiler_that_is_no_longer_used() -> None:
    compiler = GrammarCompiler(GrammarSettings())
    compiler.set_vocabulary(vocabulary)
    before = children_of(os.getpid())
    compiler.compile(StructuredOutputs(regex="a")).result()
    [sandbox] = set(children_of(os.getpid())) - set(before)
    del compiler
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(sandbox, 0)


def test_a_shutdown_in_the_middle_is_no_error_of_a_grammar(
    compiler: GrammarCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    grammars = [compiler.compile(StructuredOutputs(regex=f"[a-f]{{{i}}}")) for i in range(1, 60)]
    grammars += [compiler.compile(endless())]
    grammars[0].result()
    compiler.shutdown()
    for grammar in grammars:
        with contextlib.suppress(EngineDeadError, OverloadedError):
            grammar.result()
    assert not caplog.records


def test_good_grammars_beside_endless_ones(compiler: GrammarCompiler) -> None:
    bad = [compiler.compile(endless(str(i))) for i in range(NUM_AT_ONCE + 2)]
    good = [compiler.compile(StructuredOutputs(regex=f"[a-f]{{{i + 1}}}")) for i in range(4)]
    assert all(one.result().starts for one in good)
    for one in bad:
        with pytest.raises(RequestError, match="takes more than"):
            one.result()


def test_a_process_that_is_gone_is_replaced(compiler: GrammarCompiler) -> None:
    """Ended by the system for its memory, say: no grammar suffers."""
    before = children_of(os.getpid())
    compiler.compile(StructuredOutputs(regex="a")).result()
    [sandbox] = set(children_of(os.getpid())) - set(before)
    os.kill(sandbox, signal.SIGKILL)
    os.waitid(os.P_PID, sandbox, os.WEXITED | os.WNOWAIT)
    assert compiler.compile(StructuredOutputs(regex="b")).result().starts


def test_a_grammar_whose_process_is_ended_may_be_sent_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not be the grammar's fault; nor need it be where a busy machine took too long."""
    before = children_of(os.getpid())
    compiler.compile(StructuredOutputs(regex="a")).result()
    [sandbox] = set(children_of(os.getpid())) - set(before)
    grammar = compiler.compile(endless())
    while not children_of(sandbox):
        pass
    os.kill(sandbox, signal.SIGKILL)
    with pytest.raises(OverloadedError, match="try again"):
        grammar.result()
    assert compiler.compile(endless()) is grammar, "not at once"
    monkeypatch.setattr("quire.engine.structured_output.compiler.FORGET_S", 0.0)
    with pytest.raises(RequestError, match="takes more than"):
        compiler.compile(endless()).result()
