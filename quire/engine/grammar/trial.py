"""`Trial`: a process in which forms are compiled before the engine compiles them.

Some forms take llguidance minutes, gigabytes or more stack than there is, and nothing ends a thread
that compiles one. A process can be ended, and what it took goes with it.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from concurrent.futures import Future

import msgspec

from quire.config.structured import GrammarSettings
from quire.engine.grammar.build import Vocabulary
from quire.protocol.control import line, read_line
from quire.protocol.errors import OverloadedError, RequestError
from quire.protocol.structured import StructuredOutputs

PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import main; main()"
MODULE = "quire.engine.grammar.trial_process"


class StartTrial(msgspec.Struct):
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


class Trial:
    def __init__(self, vocabulary: Vocabulary, settings: GrammarSettings) -> None:
        # Not by `multiprocessing`, which would run the user's own script again.
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(path=sys.path, module=MODULE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it: it ends when its input does
        )
        self._numbers = itertools.count()
        self._open: dict[int, Future[Verdict]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="quire-grammar-trial", daemon=True).start()
        self._send(StartTrial(vocabulary, settings))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def grammar_text(self, wanted: StructuredOutputs) -> str:
        """The grammar of a form that can be compiled; raises `RequestError` for any other. Several
        threads may ask at once."""
        case, answer = Case(next(self._numbers), wanted), Future[Verdict]()
        self._open[case.number] = answer
        self._send(case)
        verdict = answer.result()
        if verdict.refusal is not None:
            raise RequestError(verdict.refusal)
        return verdict.text

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _send(self, message: StartTrial | Case) -> None:
        assert self._process.stdin is not None
        data = line(message)
        try:
            with self._lock:
                self._process.stdin.write(data)
                self._process.stdin.flush()
        except OSError:
            self._fail_open()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for data in self._process.stdout:
            verdict: Verdict = read_line(data, Verdict)
            self._open.pop(verdict.number).set_result(verdict)
        self._fail_open()

    def _fail_open(self) -> None:
        """The process is gone."""
        for number in list(self._open):
            answer = self._open.pop(number, None)
            if answer is not None:
                answer.set_exception(
                    OverloadedError(
                        "structured_outputs: the process that tries forms was ended; try again."
                    )
                )
