"""The garbage collector is left as it was found."""

from __future__ import annotations

import gc

from quire.frontend.step_loop import NEVER, no_full_collections


def test_full_collections_come_back_when_the_last_block_ends() -> None:
    """Also where blocks overlap without being nested, as those of two threads may."""
    before = gc.get_threshold()
    one, other = no_full_collections(), no_full_collections()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold() == (*before[:2], NEVER)
    other.__exit__(None, None, None)
    assert gc.get_threshold() == before
