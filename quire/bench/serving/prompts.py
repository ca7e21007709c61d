"""Prompts of a given length, equal for equal seeds, whose equal segments are equal text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, TypeVar

from quire.bench.serving.workload import LoadRequest, Segment
from quire.protocol.errors import OptionError

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

_WORDS = (
    "about after again air all also always and another answer any are around ask away back because "
    "been before began being below between big book both boy but call came can car change children "
    "city close come could country cut day did different does done door down each earth eat end "
    "even every eye face far father few find first follow food for form found four from get girl "
    "give good great group grow had hand hard has have head hear help her here high him his home "
    "house how idea into its just keep kind know land large last later learn leave left let life "
    "light like line list little live long look made make man many may mean men might mile more "
    "most mother mountain move much must name near need never new next night not now number off "
    "often old once one only open other our out over own page paper part people place plant play "
    "point put question quick read real right river run said same saw say school sea second see "
    "seem sentence set she should show side small some something song soon sound spell start state "
    "still stop story study such take talk tell than that the their them then there these they "
    "thing think this those thought three through time together too took tree try turn two under "
    "until use very walk want was watch water way well went were what when where which while white "
    "who why will with without word work world would write year you young your"
)
COMMON_WORDS = _WORDS.split()
"""Words that the tokenizers of most models know as one token each, with the space before them."""

FEWEST_WORDS = 50
CACHED_SEGMENTS = 1024

Item = TypeVar("Item")
Whole = TypeVar("Whole")


class Prompts(Protocol):
    """Makes the prompt of a request."""

    def make(self, request: LoadRequest) -> str | list[int]: ...


class TextPrompts:
    """Words with a space before each; as many as the request has tokens."""

    def __init__(self, seed: int, words: Sequence[str] = COMMON_WORDS) -> None:
        self._draw = _drawing(seed, [f" {word}" for word in words], "".join)

    def make(self, request: LoadRequest) -> str:
        return "".join(map(self._draw, request.segments))


class IdPrompts:
    """Token ids below `vocab_size`."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._draw = _drawing(seed, range(vocab_size), list)

    def make(self, request: LoadRequest) -> list[int]:
        return [token for segment in request.segments for token in self._draw(segment)]


def _drawing(
    seed: int, choices: Sequence[Item], join: Callable[[list[Item]], Whole]
) -> Callable[[Segment], Whole]:
    """Draws the contents of segments. A shorter segment of the same key is the longer one's start,
    as random choices come one after the other."""

    @lru_cache(CACHED_SEGMENTS)
    def draw(segment: Segment) -> Whole:
        dice = random.Random(f"{seed}/{segment.key}")
        return join(dice.choices(choices, k=segment.num_tokens))

    return draw


def words_of(tokenizer: Tokenizer) -> list[str]:
    """Words that are one token each, alone and in a row."""
    candidates = sorted(
        {
            word[1:]
            for token in range(len(tokenizer))
            if re.fullmatch(" [a-z]{2,12}", word := tokenizer.decode(token))
        }
    )
    lengths = tokenizer.encode_batch([f" {word} {word}" for word in candidates], False)
    words = [word for word, ids in zip(candidates, lengths, strict=True) if len(ids) == 2]
    if len(words) < FEWEST_WORDS:
        raise OptionError(
            f"--tokenizer {tokenizer.name_or_path!r} knows only {len(words)} words as single "
            "tokens; leave it out, or send token ids with --vocab-size."
        )
    return words


def load_tokenizer(name: str) -> Tokenizer:
    from quire.config.locate import locate_model
    from quire.text import tokenizer

    return tokenizer.load_tokenizer(locate_model(name, load_format="dummy"))
