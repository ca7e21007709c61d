"""Logging: one line per event on standard error, unless the application has set up its own."""

from __future__ import annotations

import logging
import os


def configure_logging(level_name: str | None = None) -> None:
    """Show Quire's messages where nobody else handles them: at this level, or at QUIRE_LOG_LEVEL,
    or at INFO."""
    logger = logging.getLogger("quire")
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("quire: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    name = level_name or os.environ.get("QUIRE_LOG_LEVEL", "INFO")
    level = getattr(logging, name.upper(), logging.INFO)
    logger.setLevel(level if isinstance(level, int) else logging.INFO)
