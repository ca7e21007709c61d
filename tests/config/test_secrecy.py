"""Keys given on the command line are not to be read in the list of processes."""

from __future__ import annotations

import pytest

from quire.config.secrecy import hidden


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([b"quire", b"--api-key", b"ab"], [b"quire", b"--api-key", b"**"]),
        ([b"--api-key=ab", b"--admin-key", b"\xc3\xa9"], [b"--api-key=**", b"--admin-key", b"**"]),
        # Words that merely hold a key as a part are others.
        ([b"--model", b"abc", b"x=ab"], [b"--model", b"abc", b"x=ab"]),
    ],
)
def test_keys_become_asterisks_of_the_same_length(words: list[bytes], shown: list[bytes]) -> None:
    joined = b"\0".join([*words, b""])
    assert hidden(joined, ["ab", "\u00e9"]) == b"\0".join([*shown, b""])
