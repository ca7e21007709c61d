"""Text of growing outputs: what streams adds up to what decoding everything at once gives, cut at
the first stop string, however the tokens are portioned."""

from __future__ import annotations

import re
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

from quire.protocol.sampling import SamplingParams
from quire.text.detokenizer import (
    MAX_RUN_BYTES,
    ByteStream,
    IncrementalDetokenizer,
    PieceStream,
    TextStream,
    WindowStream,
)
from quire.text.tokenizer import Tokenizer
from tests.text.tokenizer_samples import (
    LLAMA2_CONFIG,
    OTHER_LANGUAGES,
    load,
    make_folder,
    sentencepiece_folder,
    train_byte_level,
    train_sentencepiece,
)

KINDS = {"bytes": ByteStream, "pieces": PieceStream, "window": WindowStream}
PHRASES = [
    "Hello world. ",
    " the end",
    "🙂👨‍👩‍👧",
    "naïve",
    "  ",
    "\n\n",
    "字ꙮ",
    "a",
    *OTHER_LANGUAGES,
]
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """One for each way of decoding."""
    root = tmp_path_factory.mktemp("tokenizers")
    byte_level = make_folder(root / "bytes", "gpt2", {})
    train_byte_level(["<|endoftext|>", "<|im_end|>"], 500).save(str(byte_level / "tokenizer.json"))
    model = train_sentencepiece(root / "llama.model", "bpe")
    pieces = sentencepiece_folder(root / "pieces", "llama", LLAMA2_CONFIG, model)
    unigram = make_folder(root / "unigram", "llama", {})
    train_sentencepiece(unigram / "tokenizer.model", "unigram", byte_fallback=False)
    window = load(unigram)
    window.backend.decoder = decoders.Metaspace()
    made = {"bytes": load(byte_level), "pieces": load(pieces), "window": window}
    for kind, tokenizer in made.items():
        assert isinstance(tokenizer.streams.open([], True), KINDS[kind])
    return made


def reference_text(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """Decode everything; the prompt matters only as what the output continues."""
    if isinstance(tokenizer.streams.open([], skip), ByteStream):
        return tokenizer.decode(output, skip)
    before, whole = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + output, skip)
    assert whole.startswith(before)
    return whole[len(before) :]


def reference_stop(text: str, stops: list[str], floor: int = 0) -> tuple[int, str] | None:
    """Start of the stop string whose last character comes first, and that string."""
    for end in range(floor + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end - max(map(len, ending)), max(ending, key=len)
    return None


def has_long_bad_run(tokenizer: Tokenizer, output: list[int]) -> bool:
    """Bytes that are settled before a bad one follows in the same run stay as they were shown."""
    visible = tokenizer.convert_ids_to_tokens(output, skip_special_tokens=True)
    spelled = " ".join(token for token in visible if token is not None)
    for run in re.findall(r"(?:<0x[0-9A-F]{2}> ?)+", spelled):
        data = bytes(int(byte, 16) for byte in re.findall("<0x(..)>", run))
        if len(data) > MAX_RUN_BYTES and REPLACEMENT in data.decode("utf-8", "replace"):
            return True
    return False


@st.composite
def outputs(draw: st.DrawFn, tokenizer: Tokenizer) -> list[list[int]]:
    """Portions of tokens: real text cut anywhere, and arbitrary ids, also beyond the vocabulary."""
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            text = "".join(draw(st.lists(st.sampled_from(PHRASES), max_size=4)))
            ids += tokenizer.encode(text, add_special_tokens=False)
        else:
            ids += draw(st.lists(st.integers(0, len(tokenizer) + 3), max_size=6))
    assume(not has_long_bad_run(tokenizer, ids))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    edges = [0, *cuts, len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


def joined(portions: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(portions))


@st.composite
def stop_strings(draw: st.DrawFn, text: str) -> list[str]:
    """Strings that occur in the text, and others."""
    stops = draw(st.lists(st.text("ab. \nth", min_size=1, max_size=4), max_size=2))
    for _ in range(draw(st.integers(0, 2))):
        if text:
            start = draw(st.integers(0, len(text) - 1))
            stops.append(text[start : start + draw(st.integers(1, 6))])
    return [stop for stop in stops if REPLACEMENT not in stop]


def stream(detokenizer: IncrementalDetokenizer, portions: list[list[int]]) -> list[str]:
    """The deltas that a streaming client sees; stops where the stop string is found."""
    deltas = []
    for index, portion in enumerate(portions):
        stop = detokenizer.append(portion)
        last = index == len(portions) - 1
        deltas.append(detokenizer.delta(finished=last or stop is not None))
        assert detokenizer.text == "".join(deltas)
        if stop is not None:
            break
    return deltas


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_streams_add_up_to_the_decoded_text(
    kind: str, tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    """Without stop strings: any tokens in any portions give what decoding them at once gives."""
    tokenizer = tokenizers[kind]
    skip = data.draw(st.booleans())
    prompt = tokenizer.encode(data.draw(st.sampled_from(["", "Hello", "Hello ", "🙂 a"])))
    portions = data.draw(outputs(tokenizer))
    params = SamplingParams(skip_special_tokens=skip)
    expected = reference_text(tokenizer, prompt, joined(portions), skip)

    streamed = IncrementalDetokenizer(tokenizer.streams, prompt, params)
    deltas = stream(streamed, portions)
    assert "".join(deltas) == streamed.text == expected
    at_once = IncrementalDetokenizer(tokenizer.streams, np.array(prompt, np.int32), params)
    at_once.append(np.array(joined(portions), np.int32))
    at_once.finish()
    assert at_once.text == at_once.delta(True) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_text_ends_at_the_first_stop_string(
    kind: str, tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    """Nothing of it or after it is ever shown; across tokens, and whichever string comes first."""
    tokenizer = tokenizers[kind]
    prompt = tokenizer.encode("Hello")
    portions = data.draw(outputs(tokenizer))
    whole = reference_text(tokenizer, prompt, joined(portions), True)
    stops = data.draw(stop_strings(whole))
    include = data.draw(st.booleans())
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)

    expected, expected_stop = whole, None
    for count in range(1, len(portions) + 1):
        known = joined(portions[:count])
        text = reference_text(tokenizer, prompt, known, True)
        found = reference_stop(text, stops)
        if found is not None:
            start, expected_stop = found
            expected = text[: start + (len(expected_stop) if include else 0)]
            break

    detokenizer = IncrementalDetokenizer(tokenizer.streams, prompt, params)
    shown = ""
    for delta in stream(detokenizer, portions):
        shown += delta
        assert expected.startswith(shown)
    assert detokenizer.stop == expected_stop
    assert shown == detokenizer.text == expected


@given(data=st.data())
def test_portions_do_not_change_the_result(
    tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    """A final-only request and a streaming one end with the same text and the same stop string."""
    tokenizer = tokenizers["bytes"]
    portions = data.draw(outputs(tokenizer))
    ids = joined(portions)
    stops = data.draw(stop_strings(tokenizer.decode(ids, True)))
    params = SamplingParams(stop=stops, min_tokens=data.draw(st.integers(0, 8)))

    results = []
    for cut in (portions, [ids], [[token] for token in ids] or [[]]):
        detokenizer = IncrementalDetokenizer(tokenizer.streams, [], params)
        text = "".join(stream(detokenizer, cut))
        results.append((text, detokenizer.stop))
    assert results[0] == results[1] == results[2]


@given(data=st.data())
def test_stop_strings_count_only_after_min_tokens(
    tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = tokenizers["bytes"]
    text = "".join(data.draw(st.lists(st.sampled_from(["the ", "a", "b.", "\n"]), max_size=12)))
    ids = tokenizer.encode(text)
    min_tokens = data.draw(st.integers(0, len(ids) + 1))
    stops = data.draw(st.lists(st.sampled_from(["a", "th", "e a", "b.", ".\n", "aa"]), max_size=3))
    params = SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=None)
    floor = len(tokenizer.decode(ids[:min_tokens]))
    found = reference_stop(text, stops, floor)

    detokenizer = IncrementalDetokenizer(tokenizer.streams, [], params)
    shown = "".join(stream(detokenizer, [[token] for token in ids] or [[]]))
    assert detokenizer.stop == (found[1] if found else None)
    assert shown == (text[: found[0]] if found else text)


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids(tokens)
    assert tokenizer.unk_token_id not in ids
    return ids


def test_incomplete_characters_wait_for_their_bytes(tokenizers: dict[str, Tokenizer]) -> None:
    """No replacement character is streamed that a later token would have resolved."""
    for kind, before in (("bytes", ""), ("pieces", " ")):
        tokenizer = tokenizers[kind]
        ids = tokenizer.encode("🙂", add_special_tokens=False)
        assert len(ids) >= 3
        detokenizer = IncrementalDetokenizer(
            tokenizer.streams, tokenizer.encode("x"), SamplingParams()
        )
        deltas = []
        for token in ids:
            detokenizer.append([token])
            deltas.append(detokenizer.delta(False))
        assert REPLACEMENT not in "".join(deltas)
        assert "".join(deltas) + detokenizer.delta(True) == before + "🙂"


def test_characters_that_stay_incomplete_are_shown_at_the_end(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["bytes"]
    ids = tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    detokenizer = IncrementalDetokenizer(tokenizer.streams, [], SamplingParams())
    detokenizer.append(ids)
    assert detokenizer.delta(False) == detokenizer.text == "a"
    assert detokenizer.delta(True) == REPLACEMENT
    assert detokenizer.text == tokenizer.decode(ids) == "a" + REPLACEMENT


def test_sentencepiece_output_continues_the_prompt(tokenizers: dict[str, Tokenizer]) -> None:
    """The space of the first word shows after a prompt, and not where nothing stands before it."""
    tokenizer = tokenizers["pieces"]
    word = ids_of(tokenizer, "\u2581the")

    def text(prompt: list[int], **options: Any) -> str:
        detokenizer = IncrementalDetokenizer(tokenizer.streams, prompt, SamplingParams(**options))
        detokenizer.append(word)
        return detokenizer.text

    assert text(tokenizer.encode("Hello")) == " the"
    assert text([tokenizer.bos_token_id]) == "the"  # type: ignore[list-item]
    assert text([]) == "the"
    assert text([tokenizer.bos_token_id], skip_special_tokens=False) == " the"  # type: ignore[list-item]


def test_the_end_of_the_text_is_held_back_while_a_stop_string_may_form(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """Exactly as many characters as the longest stop string can reach back over."""
    tokenizer = tokenizers["bytes"]
    detokenizer = IncrementalDetokenizer(tokenizer.streams, [], SamplingParams(stop=["###", "x"]))
    for character in "ab##cd##":
        assert detokenizer.append(ids_of(tokenizer, character)) is None
    assert detokenizer.delta(False) == detokenizer.text == "ab##cd"
    assert detokenizer.append(ids_of(tokenizer, "#")) == "###"
    assert detokenizer.delta(False) == ""
    assert detokenizer.text == "ab##cd"
    assert detokenizer.append(ids_of(tokenizer, "a")) == "###"
    assert detokenizer.text == "ab##cd"


def test_stop_string_inside_a_run_of_byte_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    """It is found at once, although the run might still turn out to be no text."""
    tokenizer = tokenizers["pieces"]
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    params = SamplingParams(stop="🙂")
    detokenizer = IncrementalDetokenizer(tokenizer.streams, tokenizer.encode("x"), params)
    found = [detokenizer.append([token]) for token in [*ids_of(tokenizer, "\u2581the"), *ids]]
    assert found == [None] * 4 + ["🙂"]
    assert detokenizer.delta(True) == detokenizer.text == " the"


def test_long_runs_of_byte_tokens_are_shown_as_they_come(tokenizers: dict[str, Tokenizer]) -> None:
    """Scripts that a vocabulary lacks, and that put no spaces between words."""
    tokenizer = tokenizers["pieces"]
    text = "ភាសាខ្មែរជាភាសាផ្លូវការ"
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]
    detokenizer = IncrementalDetokenizer(tokenizer.streams, tokenizer.encode("x"), SamplingParams())
    shown = ""
    for count, token in enumerate(ids, 1):
        detokenizer.append([token])
        shown += detokenizer.delta(False)
        assert text.startswith(shown)
        assert count - len(shown.encode()) < MAX_RUN_BYTES + 3
    assert shown + detokenizer.delta(True) == text


def test_special_tokens_are_shown_on_request(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["bytes"]
    ids = tokenizer.encode("a<|im_end|>b")
    for skip, expected in ((True, "ab"), (False, "a<|im_end|>b")):
        params = SamplingParams(skip_special_tokens=skip)
        detokenizer = IncrementalDetokenizer(tokenizer.streams, [], params)
        detokenizer.append(ids)
        assert detokenizer.text == expected


def test_streams_of_one_tokenizer_do_not_disturb_each_other(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """They share tables only."""
    for tokenizer in tokenizers.values():
        texts = ["Hello world", "the end 🙂", "naïve"]
        streams: list[TextStream] = [tokenizer.streams.open([], True) for _ in texts]
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        got = [""] * len(texts)
        for step in range(max(map(len, encoded))):
            for index, ids in enumerate(encoded):
                got[index] += streams[index].push(ids[step : step + 1])
        flushed = [text + stream.flush() for text, stream in zip(got, streams, strict=True)]
        assert flushed == [tokenizer.decode(ids, True) for ids in encoded]


def test_every_token_alone(tokenizers: dict[str, Tokenizer]) -> None:
    """The tables spell each token of a vocabulary as its decoder does."""
    for tokenizer in tokenizers.values():
        for token in range(len(tokenizer)):
            stream = tokenizer.streams.open([], False)
            assert stream.push([token]) + stream.flush() == tokenizer.decode([token])


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("spaces", [False, True])
def test_spaces_between_special_tokens(tmp_path: Path, skips: bool, spaces: bool) -> None:
    """As in vLLM: of two special tokens the second comes at once, and nothing else changes. The
    text with spaces is that of transformers."""
    words = ["[UNK]", "[SEP]", "[MASK]", "hello", "world", "##ly"]
    backend = Backend(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.add_special_tokens(["[UNK]", "[SEP]", "[MASK]"])
    backend.decoder = decoders.WordPiece()
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = [3, 1, 2, 2, 4, 5, 1, 3, 4, 2, 1]
    text = theirs.decode(ids, skip_special_tokens=skips)
    expected = text if spaces else re.sub(r"(?<=\]) (?=\[)", "", text)
    assert (text == expected) == (skips or spaces)
    params = SamplingParams(skip_special_tokens=skips, spaces_between_special_tokens=spaces)
    folder = make_folder(tmp_path / "bert", "bert", {})
    backend.save(str(folder / "tokenizer.json"))
    streams = load(folder).streams
    for size in (1, 2, len(ids)):
        ours = IncrementalDetokenizer(streams, [], params)
        for first in range(0, len(ids), size):
            ours.append(ids[first : first + size])
        ours.finish()
        assert ours.text == expected
