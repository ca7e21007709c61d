"""Masks of many sequences at once: starts that they share, and requests' settings."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.device import trim_heap
from quire.config.structured import GrammarSettings
from quire.engine.structured_output import compiler as compiler_module
from quire.engine.structured_output.compiler import GrammarCompiler
from quire.engine.structured_output.grammar_source import Vocabulary
from quire.engine.structured_output.matcher import Batch, Grammar, Growth, MaskSettings, Matcher
from quire.protocol.errors import RequestError
from quire.protocol.plan import StepPlan
from quire.protocol.sampling import SamplingParams
from quire.protocol.structured import StructuredOutputs
from tests.models.reference import VOCAB
from tests.tiny import END_ID, ascii_tokenizer, text_ids

pytest.importorskip("llguidance", reason="llguidance is not installed")

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def grammar() -> Grammar:
    compiler = GrammarCompiler(GrammarSettings())
    compiler.set_vocabulary(lambda: Vocabulary(ascii_tokenizer().to_str(), VOCAB, (END_ID,)))
    made = compiler.compile(StructuredOutputs(regex="[a-f]{0,50}")).result()
    compiler.shutdown()
    return made


def mask_of(matcher: Matcher) -> bytes:
    return matcher.native.compute_bitmask()


def test_sequences_move_to_new_starts(grammar: Grammar) -> None:
    """Ten sequences are enough for three starts. Wherever one goes on, it stands where it stood."""
    matchers = [Matcher(grammar, SamplingParams(), (END_ID,)) for _ in range(10)]
    for i, (matcher, letter) in enumerate(zip(matchers, "abcdefabcd", strict=True)):
        for token in text_ids(letter) * (5 * i + 5):
            matcher.consume(token)
    before = [mask_of(matcher) for matcher in matchers]
    growth = Growth(num_threads=8)
    growth.consider(grammar)
    deadline = time.monotonic() + PATIENCE_S
    while grammar.is_growing and time.monotonic() < deadline:
        growth.poll(matchers)
    growth.shutdown()
    assert sorted(start.num_sequences for start in grammar.starts) == [3, 3, 4]
    assert [mask_of(matcher) for matcher in matchers] == before
    assert len(set(before)) > 1, "they stand at different places"
    for matcher in matchers:
        matcher.leave()
    assert [start.num_sequences for start in grammar.starts] == [0]


def test_a_start_that_comes_too_late(grammar: Grammar) -> None:
    """It holds megabytes, and nothing is left that would ever free it."""
    matchers = [Matcher(grammar, SamplingParams(), (END_ID,)) for _ in range(10)]
    growth = Growth(num_threads=8)
    growth.consider(grammar)
    for matcher in matchers:
        matcher.leave()
    deadline = time.monotonic() + PATIENCE_S
    while grammar.is_growing and time.monotonic() < deadline:
        growth.poll([])
    growth.shutdown()
    assert not grammar.is_growing and len(grammar.starts) == 1


def test_whatever_fails_is_a_refusal() -> None:
    """The step loop meets what went wrong on a thread, and must outlive it."""

    def read() -> Vocabulary:
        raise OSError("the file is gone")

    compiler = GrammarCompiler(GrammarSettings())
    compiler.set_vocabulary(read)
    with pytest.raises(RequestError, match=r"structured_outputs\.regex.*the file is gone"):
        compiler.compile(StructuredOutputs(regex="a")).result()


def test_grammars_beyond_the_cache_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not at the garbage collector's next full pass: their memory lies outside Python,
    which sees no reason for one."""
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 4)
    compiler = GrammarCompiler(GrammarSettings())
    compiler.set_vocabulary(lambda: Vocabulary(ascii_tokenizer().to_str(), VOCAB, (END_ID,)))
    gc.disable()
    try:
        made = []
        for count in range(1, 13):
            compilation = compiler.compile(StructuredOutputs(regex=f"[a-f]{{{count}}}"))
            made.append(weakref.ref(compilation.result()))
            del compilation
        # A thread may still hold the last one that it made.
        alive = [grammar for grammar in made if grammar() is not None]
        assert len(alive) <= 5
        assert made[-1]() is not None, "the last ones are kept"
    finally:
        gc.enable()
        compiler.shutdown()


def test_memory_of_given_up_grammars_is_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, on a thread of the compiler."""
    threads: list[str] = []

    def noted() -> None:
        trim_heap()
        threads.append(threading.current_thread().name)

    monkeypatch.setattr(compiler_module, "trim_heap", noted)
    monkeypatch.setattr(compiler_module, "MAX_CACHED", 2)
    monkeypatch.setattr(compiler_module, "TRIM_AFTER", 3)
    compiler = GrammarCompiler(GrammarSettings())
    compiler.set_vocabulary(lambda: Vocabulary(ascii_tokenizer().to_str(), VOCAB, (END_ID,)))
    try:
        for count in range(1, 11):
            compiler.compile(StructuredOutputs(regex=f"[a-f]{{{count}}}")).result()
    finally:
        compiler.shutdown()
    deadline = time.monotonic() + PATIENCE_S
    while len(threads) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(threads) == 2 and all(name.startswith("quire-grammar") for name in threads)


FREED_IN_PIECES = """
from pathlib import Path
from quire.config.device import trim_heap

def resident_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) // 1024

pieces = [bytes(2000) for _ in range(64 << 9)]
last = pieces[-1]  # the heap cannot shrink from its end
del pieces[1::2], pieces[1::2], pieces[1::2]
before = resident_mib()
trim_heap()
print(before - resident_mib())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_what_is_freed_between_other_pieces_is_handed_back() -> None:
    """Where the C library can: glibc."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("the C library has no malloc_trim")
    words = [sys.executable, "-c", FREED_IN_PIECES]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 20


@pytest.mark.parametrize(("num_sequences", "num_threads"), [(4, 8), (50, 1)])
def test_few_sequences_or_threads_need_one_start(
    grammar: Grammar, num_sequences: int, num_threads: int
) -> None:
    matchers = [Matcher(grammar, SamplingParams(), (END_ID,)) for _ in range(num_sequences)]
    assert not grammar.wants_start(num_threads)
    for matcher in matchers:
        matcher.leave()


TOKENS = range(70)
SETTINGS = [
    SamplingParams(),
    SamplingParams(ignore_eos=True),
    SamplingParams(allowed_token_ids=[0, 5, 64]),
]


@given(
    rows=st.lists(
        st.tuples(st.sets(st.sampled_from(TOKENS), max_size=3), st.booleans(), st.integers(0, 2)),
        min_size=1,
        max_size=6,
    )
)
def test_settings_of_requests(grammar: Grammar, rows: list[tuple[set[int], bool, int]]) -> None:
    """(tokens that the grammar allows, whether the text may end, settings) of each row."""
    eos = (2, 65)
    matchers = [Matcher(grammar, SETTINGS[which], eos) for _, _, which in rows]
    masks = np.zeros((len(rows), grammar.num_words), np.int32)
    expected = []
    for line, (tokens, may_end, which) in zip(masks, rows, strict=True):
        inner = tokens - set(eos)
        for token in inner | ({65} if may_end else set()):
            line.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        left = inner | (set(eos) if may_end and which != 1 else set())
        expected.append(left & {0, 5, 64} if which == 2 else left)
    one_left = MaskSettings(matchers).apply(masks)
    for i, wanted in enumerate(expected):
        found = {t for t in TOKENS if int(masks[i, t // 32]) >> t % 32 & 1}
        assert found == (wanted or set(TOKENS))
        assert (matchers[i].failure is None) == bool(wanted)
        assert one_left[i] == (len(wanted) == 1)
        matchers[i].leave()


def test_a_batch_is_kept_while_the_same_requests_run() -> None:
    def plan(**changed: list[int]) -> StepPlan:
        parts = {"rows": [4, 1, 2], "epochs": [7, 3, 5], "samples": [1, 0, 1]} | changed
        rows, epochs = (np.array(parts[name], np.int32) for name in ("rows", "epochs"))
        return StepPlan(
            9, rows=rows, epochs=epochs, num_samples=np.array(parts["samples"], np.int32)
        )

    now = np.array([0, 3, 5, 0, 7], np.int32)
    batch = Batch(plan(), np.array([1], np.int32), [])
    assert batch.rows.tolist() == [2]
    assert batch.is_that_of(plan(), now[batch.rows])
    for other in (plan(rows=[4, 2, 1]), plan(epochs=[7, 3, 6]), plan(samples=[1, 1, 1])):
        assert not batch.is_that_of(other, now[batch.rows])
    now[4] += 1  # of a request that no grammar constrains
    assert batch.is_that_of(plan(), now[batch.rows])
    now[2] += 1
    assert not batch.is_that_of(plan(), now[batch.rows])
