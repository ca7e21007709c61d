"""How a process ended."""

from __future__ import annotations

import signal


def exit_cause(name: str, code: int) -> str:
    """Why a process that said nothing ended, as far as its exit status tells."""
    if code >= 0:
        return f"{name} ended with status {code}; what it wrote before says why."
    number = -code
    word = signal.Signals(number).name if number in set(signal.Signals) else str(number)
    remedy = (
        " The system does this when memory runs out: lower --kv-cache-memory-bytes or "
        "--max-num-seqs, or use a smaller model."
        if number == signal.SIGKILL
        else ""
    )
    return f"{name} was killed by {word}.{remedy}"
