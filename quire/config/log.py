"""Logging: one line per event on standard error, unless the application has set up its own."""

from __future__ import annotations

import logging
import os
import sys

from quire.protocol.errors import OptionError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
QUIET = "WARNING"
"""What --quiet stands for."""
VARIABLE = "QUIRE_LOG_LEVEL"


def configure_logging(
    level: str | None = None, *, for_server: bool = False, part: str = ""
) -> None:
    """Show Quire's messages where nothing else handles them: at this level, or at QUIRE_LOG_LEVEL,
    or at INFO. A server's lines have a time and a level, and come from its libraries too; `part`
    names the process where there are several of a kind."""
    logger = logging.getLogger("quire")
    is_ours = any(isinstance(handler, _StderrHandler) for handler in logger.handlers)
    if is_ours and level is not None:
        logger.setLevel(level)
    if logger.handlers or logging.getLogger().handlers:
        return
    level = level or _level_of_environment()
    handler = _StderrHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s " if for_server else "", part))
    for name in ("quire", "uvicorn", "asyncio") if for_server else ("quire",):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False
    logger.setLevel(level)


def is_server() -> bool:
    """Whether this process logs as one of a server's."""
    return any(isinstance(one, _StderrHandler) for one in logging.getLogger("uvicorn").handlers)


def _level_of_environment() -> str:
    level = os.environ.get(VARIABLE, "INFO")
    if level.upper() not in LEVELS:
        raise OptionError(f"{VARIABLE} must be one of {', '.join(LEVELS)}, got {level!r}.")
    return level.upper()


class _StderrHandler(logging.Handler):
    """Writes to what standard error is at that time: programs and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if sys.stderr is not None:
                sys.stderr.write(self.format(record) + "\n")
                sys.stderr.flush()
        except Exception:
            self.handleError(record)


class _Formatter(logging.Formatter):
    default_msec_format = "%s.%03d"

    def __init__(self, head: str, part: str) -> None:
        super().__init__(f"{head}%(origin)s: {part}%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.origin = record.name.partition(".")[0]
        return super().format(record)
