"""From `StructuredOutputs` to a grammar's text, and from that to what llguidance makes of it: the
same in the sandbox and in the engine."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from quire.config.structured import GrammarSettings
from quire.protocol.errors import RequestError
from quire.protocol.structured import JsonSettings, StructuredOutputs, choice_terminal, closed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

T = TypeVar("T")

DEAD_END = "NoExtension"
"""How llguidance's errors begin where no token can follow."""
LEXER_FUEL = 500_000
"""What building a grammar's expressions may cost, in llguidance's units: about 50,000 in 1 ms."""
MAX_LEXER_STATES = 50_000
"""1 to 2 kB each."""
WORDS = (
    "[a-z]{1,10}",
    "[a-z ]{1,10}",
    "[a-z ]{1,30}",
    "[A-Za-z]{1,10}",
    "[A-Za-z ]{1,10}",
    "[A-Za-z ]{1,30}",
)
"""Sets of tokens that grammars often allow all of, from small to large. Where they do, a mask takes
the set as it is; otherwise each of its tokens is looked at. llguidance has such sets for the
strings of JSON; these are for expressions: a mask of `[a-z ]{400}` took 700 us, and takes 10."""
ANYTHING = r"(.|\n){1,100}"
"""The largest such set; tokens are hardly ever longer."""
FREE_TEXT = r"(.|\n)*"
"""Around the tags of a structural tag."""
STACK_BYTES = 1 << 30
"""Of a thread that compiles: llguidance follows rules and references by recursion, and a stack that
overflows ends the process. Address space; memory is taken as far as a grammar goes down. One of
1 MiB needs 400 MB."""

_stack_lock = threading.Lock()

_SOURCE = re.compile(r"^ *\d+ \| .*$|^ +\^$", re.MULTILINE)
"""Lines of a grammar that an error of llguidance shows, and the mark below the last one."""
_PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
"""How such an error begins."""


@dataclass(frozen=True)
class Vocabulary:
    """What a grammar must know of the tokenizer."""

    tokenizer_json: str
    """In the `tokenizers` library's format."""
    vocab_size: int
    """The model's; it may be larger than the tokenizer's."""
    eos_token_ids: tuple[int, ...]


def where(wanted: StructuredOutputs) -> str:
    """The name of the request's field, for messages."""
    return f"structured_outputs.{wanted.kind}"


def make_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise RequestError(
            "structured_outputs needs the package llguidance; install it with "
            "`pip install llguidance`."
        ) from None
    try:
        spaces, *strings = LLTokenizer.general_slices()
        return LLTokenizer(
            vocabulary.tokenizer_json,
            n_vocab=vocabulary.vocab_size,
            eos_token=list(vocabulary.eos_token_ids),
            slices=[spaces, *WORDS, *strings, ANYTHING],
        )
    except ValueError as error:
        raise RequestError(
            f"structured_outputs cannot be used: llguidance cannot read this model's "
            f"tokenizer: {error}."
        ) from None


def build(tokenizer: LLTokenizer, text: str, where: str) -> LLMatcher:
    """A start for sequences, from a grammar's text; raises `RequestError` if it is refused."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
    made = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if not made.is_error():
        # The first mask costs as much as building the grammar did: pay for it here.
        tried = made.deep_copy()
        tried.compute_bitmask()
        if tried.is_error():
            made = tried
    if made.is_error():
        raise RequestError(f"{where} is refused: {_reason(made.get_error())}")
    if unenforced := made.get_grammar_warnings():
        raise RequestError(f"{where} cannot be enforced in full: {'; '.join(unenforced)}")
    return made


def _reason(error: str) -> str:
    """llguidance's message, cut to what a client can use."""
    if error.startswith(DEAD_END):
        return "no text can match it."
    text = " ".join(_SOURCE.sub("", error).split())
    place = _PLACE.match(text)
    if place is not None:
        return f"line {place[1]}: {_reason(text[place.end() :])}"
    keywords = re.fullmatch(r"Unimplemented keys: \[(.*)\]", text)
    if keywords is not None:
        return f"the keywords {keywords[1]} cannot be enforced; leave them out."
    return text if len(text) <= 500 else text[:500] + "..."


def submit(pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: object) -> Future[T]:
    """As `pool.submit`; the thread that it may start gets the large stack."""
    with _stack_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            return pool.submit(function, *arguments)
        finally:
            threading.stack_size(before)


def grammar_text(wanted: StructuredOutputs, settings: GrammarSettings) -> str:
    """A grammar in llguidance's own notation; it is not checked yet."""
    from llguidance import LLMatcher

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return LLMatcher.grammar_from_lark(f"start: CHOICE\n{choice_terminal('CHOICE', wanted)}")
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(_as_lark(wanted.grammar))
    of_json = settings.for_json(wanted.json_settings)
    if wanted.structural_tag is not None:
        return LLMatcher.grammar_from_lark(_tags(json.loads(wanted.structural_tag), of_json))
    return _schema(wanted, of_json)


def _schema(wanted: StructuredOutputs, settings: JsonSettings) -> str:
    from llguidance import LLMatcher

    schema = json.loads(wanted.text)
    if not isinstance(schema, dict | bool):
        raise RequestError(
            f"structured_outputs.json must be a JSON schema, got {str(schema)[:200]!r}."
        )
    if schema is True:
        schema = {}
    if settings.disable_additional_properties:
        schema = closed(schema)
    # Overrides, not defaults: a schema's own "x-guidance" must not turn keywords off.
    overrides: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}
    overrides.update(settings.guidance())  # type: ignore[typeddict-item]
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)


def _as_lark(grammar: str) -> str:
    if re.search(r"^[ \t]*[\w-]+[ \t]*::=", grammar, re.MULTILINE) is None:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # its own kinds, and those of broken text
        raise RequestError(
            f"structured_outputs.grammar looks like GBNF but cannot be read: {error}."
        ) from None


def _tags(tag: Any, settings: JsonSettings) -> str:
    """Free text with tagged parts. Both of vLLM's notations are read: `structures` and `triggers`,
    and `format` of type "triggered_tags"."""
    parts, triggers = _tag_parts(tag)
    texts = [text for begin, _, end in parts for text in (begin, end)] + triggers
    if not parts or not triggers or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            "structured_outputs.structural_tag must have structures and triggers, or a format of "
            f"type 'triggered_tags' with tags and triggers, got {str(tag)[:200]!r}."
        )
    lines = [
        f"start: ({' | '.join(f'tag_{i}' for i in range(len(parts)))})* tag_end",
        "tag_end: TAG_TEXT",
        f"TAG_TEXT: /{FREE_TEXT}/",
    ]
    for i, (begin, schema, end) in enumerate(parts):
        trigger = next((t for t in triggers if t and begin.startswith(t)), None)
        if trigger is None:
            raise RequestError(
                f"structured_outputs.structural_tag: no trigger begins {begin!r}; got {triggers!r}."
            )
        words = [json.dumps(begin[len(trigger) :])] if begin != trigger else []
        words += [
            f"%json {json.dumps(settings.embedded(schema))}",
            *([json.dumps(end)] if end else []),
        ]
        lines.append(f"tag_{i}_trigger[lazy]: TAG_TEXT {json.dumps(trigger)}")
        lines.append(f"tag_{i}: tag_{i}_trigger {' '.join(words)}")
    return "\n".join(lines) + "\n"


def _tag_parts(tag: Any) -> tuple[list[tuple[str, Any, str]], list[str]]:
    try:
        if "structures" in tag:
            parts = [(one["begin"], one["schema"], one["end"]) for one in tag["structures"]]
            return parts, list(tag["triggers"])
        layout = tag["format"]
        parts = [
            (one["begin"], one["content"]["json_schema"], one["end"]) for one in layout["tags"]
        ]
        return parts, list(layout["triggers"])
    except (TypeError, KeyError):
        return [], []
