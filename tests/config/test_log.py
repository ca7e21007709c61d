"""What Quire says on standard error: at which level, in which format, and where to."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.config.log import configure_logging
from quire.protocol.errors import OptionError
from tests.server.running import ENGINE, RunningServer
from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
SERVERS_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO quire: ")


@contextlib.contextmanager
def bare_logging() -> Iterator[logging.Logger]:
    """Logging as a program finds it at its start; pytest has handlers of its own."""
    root, quire = logging.getLogger(), logging.getLogger("quire")
    before = root.handlers, quire.handlers, quire.level, quire.propagate
    root.handlers, quire.handlers = [], []
    try:
        yield quire
    finally:
        root.handlers, quire.handlers, level, quire.propagate = before
        quire.setLevel(level)


def test_lines_go_to_what_standard_error_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that was replaced and closed since would end in tracebacks of logging itself."""
    with bare_logging() as logger:
        check_replaced_streams(logger, monkeypatch)


def check_replaced_streams(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    configure_logging("INFO")
    logger.info("one")
    monkeypatch.setattr(sys, "stderr", second)
    first.close()
    logger.info("two")
    logger.debug("unheard")
    configure_logging("DEBUG")
    logging.getLogger("quire.x.y").debug("heard")
    assert second.getvalue() == "quire: two\nquire: heard\n"
    monkeypatch.setattr(sys, "stderr", None)  # as pythonw does
    logger.info("nowhere")


def test_level_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "loud")
    wrong = pytest.raises(OptionError, match=r"QUIRE_LOG_LEVEL must be one of DEBUG, .*'loud'")
    with bare_logging(), wrong:
        configure_logging()
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "warning")
    with bare_logging() as logger:
        configure_logging()
        assert logger.level == logging.WARNING


def test_server_says_three_things() -> None:
    """Model and device, cache, ready; with a time and a level."""
    server = RunningServer.start(*ENGINE)
    try:
        lines = server.lines[:]
        assert server.url and all(SERVERS_LINE.match(line) for line in lines), lines
        first, second, third = (line.split("INFO quire: ")[1] for line in lines)
        assert first.startswith("model: ") and second.startswith("KV cache: ")
        assert re.match(r"ready in [\d.]+ s, serving on http://127.0.0.1:\d+$", third)
    finally:
        assert server.stop() == 0


def test_a_quiet_server_says_nothing() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "quire", "serve", *ENGINE, "--quiet", "--port", str(port)]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
                break
            time.sleep(0.1)
        else:
            pytest.fail("the server does not answer")
        server.terminate()
        assert server.communicate()[1] == ""
    assert server.returncode == 0


SCRIPT = "import sys; from quire import LLM; LLM(sys.argv[1], **eval(sys.argv[2]))"


def in_script(model: str, **arguments: object) -> list[str]:
    """What a script that starts an engine says."""
    words = [sys.executable, "-c", SCRIPT, model, repr(arguments)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stderr.splitlines()


def test_scripts_say_three_things(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    small = {"num_threads": 1, "kv_cache_memory_bytes": "32MiB"}
    lines = in_script(str(tmp_path), **small)
    heads = ["quire: model: ", "quire: KV cache: ", "quire: ready in "]
    assert len(lines) == 3 and all(map(str.startswith, lines, heads)), lines
    assert in_script(str(tmp_path), **small, log_level="error") == []


def test_errors_at_start_up_are_short() -> None:
    """The traceback of huggingface_hub and what it stands on is for DEBUG."""
    lines = in_script("nosuch/model")
    assert len(lines) < 12 and "During handling" not in "\n".join(lines), lines
    assert lines[-1].startswith("quire.protocol.errors.ModelError: model 'nosuch/model' ")
    more = in_script("nosuch/model", log_level="DEBUG")
    assert len(more) > 30 and more[-1] == lines[-1]
