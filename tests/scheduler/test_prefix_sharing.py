"""Blocks that several requests use: what is shared, what is copied, what is kept apart, what goes
first. Outputs are compared with a reference in every test: see `Engine.finish`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.protocol.adapter import AdapterLimits
from quire.protocol.request import MediaSpan, NewRequest
from quire.protocol.sampling import SamplingParams
from quire.scheduler.kv_cache import BlockPool, RadixTree, chain_hash, chain_root
from tests.engine.driver import Engine, numbers


def test_a_prefix_in_mid_prefill_is_shared() -> None:
    """Requests that arrive while their common prefix is being computed do not compute it again."""
    engine = Engine(max_num_batched_tokens=16)
    prefix = numbers(64)
    keys = []
    for i in range(4):
        keys.append(engine.add(prefix + numbers(6, start=50 + i), max_tokens=1))
        engine.step()
    assert not engine.ended, "the first is still being prefilled"
    engine.finish()
    assert engine.toy.num_tokens_computed == 64 + 4 * 6
    assert [engine.cached(key) for key in keys] == [0, 64, 64, 64]


def test_a_prompt_is_shared_as_far_as_it_has_come() -> None:
    """Steps of 8 tokens: a prompt that comes with the fourth has 32 of another's 64."""
    engine = Engine(long_prefill_token_threshold=8)
    engine.add(numbers(64))
    engine.step(3)
    late = engine.add(numbers(64))
    engine.finish()
    assert engine.cached(late) == 32


def test_requests_of_one_step_share_what_that_step_computes() -> None:
    engine = Engine()
    keys = [engine.add([*numbers(40), i], max_tokens=1) for i in range(5)]
    engine.step()
    assert len(engine.plans) == 1 and engine.plans[0].num_tokens == 41 + 4
    engine.finish()
    assert [engine.cached(key) for key in keys] == [0, 40, 40, 40, 40]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11, 12, 13])
def test_everything_but_the_last_prompt_token_can_come_from_the_cache(length: int) -> None:
    """The same prompt again: whole blocks are shared, the rest is copied, one token is computed."""
    engine = Engine()
    first = engine.add(numbers(length), max_tokens=3)
    engine.finish()
    again = engine.add(numbers(length), max_tokens=3)
    engine.finish()
    assert engine.cached(first) == 0 and engine.cached(again) == length - 1
    assert len(engine.plans[3].copy_sources) == (1 if (length - 1) % 4 else 0)


def test_sharing_reaches_into_a_block() -> None:
    """Prompts that agree in 10 tokens share them although a block holds 16."""
    engine = Engine(block_size=16)
    keys = []
    for i in range(3):
        keys.append(engine.add(numbers(10) + numbers(5, start=40 + i)))
        engine.finish()
    assert [engine.cached(key) for key in keys] == [0, 10, 10]


def test_generated_tokens_are_found_again() -> None:
    """A conversation that goes on from an answer does not compute the answer again."""
    engine = Engine()
    first = engine.add(numbers(10), max_tokens=9)
    engine.finish()
    answer = engine.ended[first].token_ids.tolist()
    second = engine.add(numbers(10) + answer + [1, 2, 3])
    engine.finish()
    # The last generated token was never an input.
    assert engine.cached(second) == 10 + 8


def test_beams_are_found_again() -> None:
    """All of them, whichever was forked from which; their last tokens were never inputs."""
    engine = Engine()
    key = engine.add(numbers(10), max_tokens=14, beam_width=3)
    while engine.core.has_work:
        engine.step()
    for beam in engine.ended[key].beams or ():
        again = engine.add(numbers(10) + beam.token_ids, max_tokens=1)
        while engine.core.has_work:
            engine.step()
        assert engine.cached(again) == 10 + 13
    assert len(engine.ended) == 1 + 3


@pytest.mark.parametrize(
    "change", [{"cache_salt": "b"}, {"cache_salt": None}, {"cache_salt": "a", "adapter": "x-8"}]
)
def test_salt_and_adapter_separate(change: dict[str, Any]) -> None:
    engine = Engine(adapters=AdapterLimits(1, 8, 1))
    engine.add(numbers(20), cache_salt="a")
    engine.finish()
    other = engine.add(numbers(20), **change)
    same = engine.add(numbers(20), cache_salt="a")
    engine.finish()
    assert engine.cached(other) == 0 and engine.cached(same) == 19


@pytest.mark.parametrize("steps", [0, 1, 40])
@pytest.mark.parametrize("length", [20, 21])
def test_tenants_are_kept_apart(steps: int, length: int) -> None:
    """In mid-prefill, within a block, and with the same salt; not within one of them."""
    engine = Engine(max_num_batched_tokens=8)
    for salt in (None, "salt"):
        engine.add(numbers(length), tenant="a", cache_salt=salt)
        engine.step(steps)
        other = engine.add(numbers(length), tenant="b", cache_salt=salt)
        engine.finish()
        same = [engine.add(numbers(length), tenant=one, cache_salt=salt) for one in "ab"]
        engine.finish()
        assert engine.cached(other) == 0
        assert [engine.cached(key) for key in same] == [length - 1] * 2


def test_tenants_that_share_prefixes() -> None:
    """They share among each other, not with a tenant that does not, whatever its name."""
    engine = Engine()
    first = engine.add(numbers(20), tenant="a", shares_prefixes=True)
    engine.finish()
    apart = [engine.add(numbers(20), tenant=one) for one in ("a", "b")]
    other = engine.add(numbers(20), tenant="b", shares_prefixes=True)
    engine.finish()
    assert [engine.cached(key) for key in (first, *apart, other)] == [0, 0, 0, 19]


@pytest.mark.parametrize("budget", [256, 8])
@pytest.mark.parametrize(("length", "rest"), [(2, 9), (6, 9), (6, 0)])
def test_equal_placeholders_of_different_media_are_kept_apart(
    length: int, rest: int, budget: int
) -> None:
    """In blocks that are admitted, in those that follow, and in the one that the answer fills. They
    begin in the second block."""
    engine = Engine(max_num_batched_tokens=budget)
    prompt = numbers(5) + [9] * length + numbers(rest, start=3)
    keys = []
    for digest in (b"cat", b"dog", b"cat", b"dog"):
        keys.append(engine.add(prompt, media=(MediaSpan(5, length, digest),)))
        engine.finish()
    assert [engine.cached(key) for key in keys] == [0, 4, len(prompt) - 1, len(prompt) - 1]


@pytest.mark.parametrize(
    ("media", "num_shared"),
    [
        ([MediaSpan(6, 9, b"cat")], 19),
        ([MediaSpan(6, 10, b"cat")], 4),  # more tokens, as of another resolution
        ([MediaSpan(7, 9, b"cat")], 4),
        ([MediaSpan(6, 9, b"cat"), MediaSpan(16, 2, b"dog")], 16),
        ([MediaSpan(6, 2, b"cat"), MediaSpan(8, 9, b"cat")], 4),
        ([], 4),
    ],
)
def test_parts_of_a_medium_are_told_apart(media: list[MediaSpan], num_shared: int) -> None:
    """By where it begins and how many tokens stand for it, although placeholders and digest are
    equal."""
    engine, prompt = Engine(), [*numbers(6), *[9] * 12, 1, 2]
    engine.add(prompt, media=(MediaSpan(6, 9, b"cat"),))
    engine.finish()
    again = engine.add(prompt, media=tuple(media))
    engine.finish()
    assert engine.cached(again) == num_shared


def test_a_hash_covers_everything_before_it() -> None:
    """Equal blocks after different beginnings are different blocks."""
    engine = Engine()
    engine.add(numbers(4) + [9] * 8)
    engine.finish()
    other = engine.add(numbers(4, start=3) + [9] * 8)
    engine.finish()
    assert engine.cached(other) == 0


def test_names_of_blocks_last() -> None:
    """Parts of a root are told apart, and names are the same in every process and release."""
    assert chain_root("ab", "c") != chain_root("a", "bc")
    name = chain_hash(chain_root("model", ""), _ids(0, 4))
    assert name.hex() == "1bb809580f41c57e8b272f612a37d928"


def test_names_of_blocks_are_those_of_one_model() -> None:
    names = []
    for model in ("a", "b", "a"):
        engine = Engine(cache_identity=(model,))
        engine.add(numbers(4), max_tokens=1)
        engine.finish()
        kv = engine.core.scheduler.kv
        names.append({kv.tree.name_of(block) for block in np.flatnonzero(kv.pool.cached)})
    assert names[0] == names[2] and not names[0] & names[1]


def _ids(start: int, stop: int) -> Any:
    return np.arange(start, stop, dtype=np.int32)


def test_reset_forgets_all_prefixes_also_in_mid_run() -> None:
    engine = Engine()
    running = engine.add(numbers(20), max_tokens=12)
    engine.step(3)
    engine.core.reset_prefix_cache()
    late = engine.add(numbers(20))
    engine.finish()
    assert engine.cached(late) == 0
    assert {running, late} == set(engine.ended)
    engine.core.reset_prefix_cache()
    assert len(engine.core.scheduler.kv.tree) == 0
    last = engine.add(numbers(20))
    engine.finish()
    assert engine.cached(last) == 0


def test_without_caching_nothing_is_shared_between_requests() -> None:
    engine = Engine(enable_prefix_caching=False)
    keys = [engine.add(numbers(20)), engine.add(numbers(20))]
    engine.finish()
    keys.append(engine.add(numbers(20)))
    engine.finish()
    assert [engine.cached(key) for key in keys] == [0, 0, 0]
    assert len(engine.core.scheduler.kv.tree) == 0


@pytest.mark.parametrize("wish", [{"skip_reading_prefix_cache": True}, {"prompt_logprobs": 1}])
def test_what_reads_nothing_from_the_cache(wish: dict[str, Any]) -> None:
    """Logprobs of a prompt need all of it computed, by the first of its sequences alone."""
    engine = Engine()
    engine.add(numbers(20))
    engine.finish()
    key = 100
    params = SamplingParams(max_tokens=2, seed=key, n=2, **wish)
    engine.requests[key] = NewRequest(
        key, "skips", np.array(numbers(20), np.int32), params, arrival_time=0.0
    )
    engine.core.add(engine.requests[key])
    engine.finish()
    assert engine.cached(key) == 0
    wanted = [added.num_prompt_logprobs for plan in engine.plans for added in plan.added_rows]
    assert wanted == [-1, wish.get("prompt_logprobs", -1), -1]


def test_sequences_of_one_prompt_wait_until_it_is_computed() -> None:
    """All but the first compute the last token of it, also where it takes several steps; then each
    computes what it generates, without its last token."""
    engine = Engine(enable_prefix_caching=False, long_prefill_token_threshold=8)
    engine.add(numbers(24), max_tokens=4, n=4)
    engine.finish()
    assert engine.toy.num_tokens_computed == 24 + 3 + 4 * 3


@pytest.mark.parametrize("caching", [True, False])
def test_sequences_of_one_prompt_share_its_blocks(caching: bool) -> None:
    """n=4 holds the prompt's full blocks once: 5 of 4 tokens, and per sequence a copy of the sixth
    and one more for what it generates."""
    engine = Engine(enable_prefix_caching=caching)
    engine.add(numbers(24), max_tokens=4, n=4)
    engine.finish()
    assert len(engine.ended) == 4
    assert engine.core.statistics().peak_blocks == 5 + 4 * 2
    assert engine.toy.num_tokens_computed == 24 + 3 + 4 * 3
    assert len({tuple(s.token_ids.tolist()) for s in engine.ended.values()}) == 4


def test_blocks_outside_the_tree_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(6)
    tree = RadixTree(pool, 4)
    blocks = pool.allocate(6)
    root = chain_root("m")
    for block in (blocks[0], blocks[1], blocks[4]):
        tree.insert(root, _ids(10 * block, 10 * block + 4), [[block]], 0, step=0)
    pool.free([blocks[4]])
    pool.free([blocks[0], blocks[2]])
    pool.free([blocks[1]])
    pool.free([blocks[3], blocks[5]])
    taken = [pool.allocate(1)[0] for _ in range(6)]
    assert set(taken[:3]) == {blocks[2], blocks[3], blocks[5]}
    assert taken[3:] == [blocks[4], blocks[0], blocks[1]]
    assert len(tree) == 0 and not any(pool.cached)


def test_a_shared_block_is_used_until_its_last_owner_leaves() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.free([block])
    assert not pool.is_free(block) and pool.num_free == 2
    pool.free([block])
    assert pool.is_free(block)
    pool.share([block])
    assert not pool.is_free(block) and pool.num_used == 1
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block, block])


def test_prefixes_lose_their_deepest_blocks_first_and_the_oldest_prefix_before_others() -> None:
    """Two prompts of 5 blocks each fill the cache. Each time a third takes blocks, the less
    recently used of them loses its tail, and what is left of it is still found."""
    engine = Engine(num_blocks=12)
    old, new = numbers(20), numbers(20, start=3)
    for prompt in (old, new):
        engine.add(prompt, max_tokens=1)
        engine.finish()
    third = engine.add(numbers(15, start=5), max_tokens=1)
    engine.finish()
    assert engine.cached(third) == 0
    # 10 of 12 blocks held prefixes; the third needed 4, so two deepest blocks of `old` went.
    match, _ = _lookup(engine, old)
    assert match.num_tokens == 12
    match, _ = _lookup(engine, new)
    assert match.num_tokens == 19


def _lookup(engine: Engine, prompt: list[int]) -> Any:
    """What a request for `prompt` would find now."""
    scheduler = engine.core.scheduler
    key = engine.add(prompt, max_tokens=1)
    found = scheduler.kv.match(scheduler.requests[f"r{key}"][0], step=10_000)
    engine.core.abort(f"r{key}")
    return found


def test_a_prefix_that_is_used_again_outlives_others() -> None:
    engine = Engine(num_blocks=12)
    first, second = numbers(20), numbers(20, start=3)
    for prompt in (first, second, first):
        engine.add(prompt, max_tokens=1)
        engine.finish()
    engine.add(numbers(15, start=5), max_tokens=1)
    engine.finish()
    assert _lookup(engine, first)[0].num_tokens == 19
    assert _lookup(engine, second)[0].num_tokens < 19
