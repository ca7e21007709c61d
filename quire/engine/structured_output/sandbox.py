"""`Sandbox`: a process in which grammars are compiled before the engine compiles them.

Some grammars take llguidance minutes, gigabytes or more stack than there is, and nothing ends a
thread that compiles one. A process can be ended, and what it took goes with it.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from typing import IO

import msgspec

from quire.config.structured import GrammarSettings
from quire.engine.structured_output.grammar_source import Vocabulary
from quire.protocol.codec import line, read_line
from quire.protocol.errors import OverloadedError, RequestError
from quire.protocol.structured import StructuredOutputs

PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import main; main()"
MODULE = "quire.engine.structured_output.sandbox_process"
ENDED = "structured_outputs: the process that compiles grammars was ended; try again."


class StartSandbox(msgspec.Struct):
    """The first line to the process."""

    vocabulary: Vocabulary
    settings: GrammarSettings


class Case(msgspec.Struct):
    """Each further line."""

    number: int
    wanted: StructuredOutputs


class Verdict(msgspec.Struct):
    """Its answer to a case."""

    number: int
    text: str = ""
    """What to compile."""
    refusal: str | None = None


class OpenCases:
    """Those that have no verdict yet."""

    def __init__(self) -> None:
        self._answers: dict[int, Future[Verdict]] = {}
        self._numbers = itertools.count()
        self.have_failed = False
        self._lock = threading.Lock()

    def open(self, wanted: StructuredOutputs) -> tuple[Case, Future[Verdict]]:
        case, answer = Case(next(self._numbers), wanted), Future[Verdict]()
        with self._lock:
            if self.have_failed:
                raise OverloadedError(ENDED)
            self._answers[case.number] = answer
        return case, answer

    def close(self, verdict: Verdict) -> None:
        with self._lock:
            answer = self._answers.pop(verdict.number, None)
        if answer is not None:
            answer.set_result(verdict)

    def fail(self) -> None:
        """The process is gone: neither these nor later ones get a verdict."""
        with self._lock:
            self.have_failed = True
            answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.set_exception(OverloadedError(ENDED))


class Sandbox:
    """Ends its process when it is not used any more, or the program ends."""

    def __init__(self, vocabulary: Vocabulary, settings: GrammarSettings) -> None:
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python skips others too
        try:
            # Not by `multiprocessing`, which would run the user's own script again.
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(path=path, module=MODULE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is not for it: it ends when its input does
            )
        except OSError as error:
            raise OverloadedError(
                f"structured_outputs: the grammar process cannot be started: {error}."
            ) from None
        self._cases = OpenCases()
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, _end, self._process)
        threading.Thread(
            target=_read,
            args=(self._process.stdout, self._cases),
            name="quire-grammar-sandbox",
            daemon=True,
        ).start()
        self._send(StartSandbox(vocabulary, settings))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._cases.have_failed and self._process.poll() is None

    def grammar_text(self, wanted: StructuredOutputs) -> str:
        """The text of a grammar that can be compiled; raises `RequestError` for any other. Several
        threads may ask at once."""
        case, answer = self._cases.open(wanted)
        self._send(case)
        verdict = answer.result()
        if verdict.refusal is not None:
            raise RequestError(verdict.refusal)
        return verdict.text

    def _send(self, message: StartSandbox | Case) -> None:
        assert self._process.stdin is not None
        data = line(message)
        try:
            with self._lock:
                self._process.stdin.write(data)
                self._process.stdin.flush()
        except (OSError, ValueError):  # its reader is gone, or it is closed
            self._cases.fail()


def _read(answers: IO[bytes], cases: OpenCases) -> None:
    """Give verdicts to the threads that wait for them, until the process ends. On a thread, which
    does not hold the `Sandbox`: it would never be let go."""
    # What cannot be read was cut off by the end, or something else in it prints.
    with answers, contextlib.suppress(msgspec.MsgspecError):
        for data in answers:
            cases.close(read_line(data, Verdict))
    cases.fail()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # what it did not read is lost
        process.stdin.close()
