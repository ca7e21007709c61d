"""Forms that llguidance would compile for ever, or die of: in a process of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.config.structured import GrammarSettings
from quire.engine.grammar.build import Vocabulary
from quire.engine.grammar.compiler import NUM_AT_ONCE, GrammarCompiler
from quire.engine.grammar.trial import Trial
from quire.protocol.errors import OverloadedError, RequestError
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
def trial() -> Iterator[Trial]:
    made = Trial(vocabulary(), GrammarSettings())
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


def test_an_endless_form_ends_and_leaves_nothing(trial: Trial) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.json takes more than 0\.7 s"):
        trial.grammar_text(endless())
    assert not children_of(trial.pid)
    assert "a" in trial.grammar_text(StructuredOutputs(regex="a"))


LIMITED = """
import sys
from quire.config.structured import GrammarSettings
from quire.engine.grammar import trial_process
from quire.engine.grammar.build import Vocabulary
from quire.engine.grammar.trial import Case, StartTrial
from quire.protocol.structured import StructuredOutputs
vocabulary = Vocabulary(sys.stdin.read(), {size}, ({end},))
process = trial_process.TrialProcess(StartTrial(vocabulary, GrammarSettings()))
case = Case(7, StructuredOutputs(choice=["xy" * 40_000]))
for extra in (1 << 20, 1 << 30):
    status = open("/proc/self/status").read()
    used = int(status.split("VmSize:")[1].split()[0]) << 10
    trial_process.MAX_BYTES = used + trial_process.STACK_BYTES + extra
    pipe, fork = process._fork(case)
    fork.written += open(pipe, "rb").read()
    print(fork.verdict().refusal)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_form_that_takes_too_much_memory() -> None:
    """With a limit so low that it is reached before the clock ends the form."""
    command = [sys.executable, "-c", LIMITED.format(size=VOCAB, end=END_ID)]
    given = vocabulary().tokenizer_json
    ended = subprocess.run(command, input=given, capture_output=True, text=True)
    refused, accepted = ended.stdout.splitlines()
    assert refused.startswith("structured_outputs.choice takes more than the memory")
    assert "memory" not in accepted


def test_good_forms_beside_endless_ones(compiler: GrammarCompiler) -> None:
    bad = [compiler.compile(endless(str(i))) for i in range(NUM_AT_ONCE + 2)]
    good = [compiler.compile(StructuredOutputs(regex=f"[a-f]{{{i + 1}}}")) for i in range(4)]
    assert all(one.result().starts for one in good)
    for one in bad:
        with pytest.raises(RequestError, match="takes more than"):
            one.result()


def test_a_process_that_is_gone_is_replaced(compiler: GrammarCompiler) -> None:
    """Ended by the system for its memory, say: no form suffers."""
    before = children_of(os.getpid())
    compiler.compile(StructuredOutputs(regex="a")).result()
    [trial] = set(children_of(os.getpid())) - set(before)
    os.kill(trial, signal.SIGKILL)
    os.waitid(os.P_PID, trial, os.WEXITED | os.WNOWAIT)
    assert compiler.compile(StructuredOutputs(regex="b")).result().starts


def test_a_form_whose_process_is_ended_may_be_sent_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not be the form's fault; nor need it be where a busy machine took too long."""
    before = children_of(os.getpid())
    compiler.compile(StructuredOutputs(regex="a")).result()
    [trial] = set(children_of(os.getpid())) - set(before)
    form = compiler.compile(endless())
    while not children_of(trial):
        pass
    os.kill(trial, signal.SIGKILL)
    with pytest.raises(OverloadedError, match="try again"):
        form.result()
    assert compiler.compile(endless()) is form, "not at once"
    monkeypatch.setattr("quire.engine.grammar.compiler.FORGET_S", 0.0)
    with pytest.raises(RequestError, match="takes more than"):
        compiler.compile(endless()).result()
