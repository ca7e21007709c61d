"""Logging: one line per event on standard error, unless the application has set up its own."""

from __future__ import annotations

import logging
import os


def configure_logging() -> None:
    """Show Quire's messages at QUIRE_LOG_LEVEL (INFO) where nobody else handles them."""
    logger = logging.getLogger("quire")
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("quire: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    level = getattr(logging, os.environ.get("QUIRE_LOG_LEVEL", "INFO").upper(), logging.INFO)
    logger.setLevel(level if isinstance(level, int) else logging.INFO)
