"""Which running requests share leading blocks, and how that is told to the workers."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.layers.attention.shared_prefix import max_tiles, prefix_tiles
from quire.protocol.plan import MIN_PREFIX_GROUP
from quire.scheduler.prefix_groups import best_groups
from tests.engine.driver import Engine, numbers


def common(tables: np.ndarray, rows: tuple[int, ...], num_blocks: np.ndarray) -> int:
    depth = 0
    while depth < min(num_blocks[r] for r in rows) and len({tables[r, depth] for r in rows}) == 1:
        depth += 1
    return depth


def most_saved(tables: np.ndarray, rows: tuple[int, ...], num_blocks: np.ndarray) -> int:
    """The best over all ways to choose disjoint groups, by trying them all."""
    best = 0
    for size in range(MIN_PREFIX_GROUP, len(rows) + 1):
        for chosen in itertools.combinations(rows, size):
            rest = tuple(r for r in rows if r not in chosen and r > chosen[0])
            saved = (size - 1) * common(tables, chosen, num_blocks)
            best = max(best, saved + most_saved(tables, rest, num_blocks))
    return best


@given(st.data())
def test_groups_save_as_much_as_the_best_of_all_groupings(data: st.DataObject) -> None:
    """Block ids are those of a tree: the same id means the same beginning."""
    num_rows = data.draw(st.integers(1, 9))
    paths = [
        data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4)) for _ in range(num_rows)
    ]
    ids: dict[tuple[int, ...], int] = {}
    tables = np.zeros((num_rows, 4), np.int32)
    for row, path in enumerate(paths):
        for depth in range(len(path)):
            tables[row, depth] = ids.setdefault(tuple(path[: depth + 1]), len(ids) + 1)
    num_blocks = np.array([len(path) for path in paths], np.int32)
    rows = np.arange(num_rows, dtype=np.int32)
    groups = best_groups(tables, rows, num_blocks)
    members = [r for group, _ in groups for r in group.tolist()]
    assert len(members) == len(set(members))
    for group, blocks in groups:
        assert len(group) >= MIN_PREFIX_GROUP
        assert 0 < blocks <= common(tables, tuple(group.tolist()), num_blocks)
    saved = sum((len(group) - 1) * blocks for group, blocks in groups)
    assert saved == most_saved(tables, tuple(range(num_rows)), num_blocks)


def test_a_long_chain_of_forks_is_cut_off_not_followed() -> None:
    """A thousand nested beginnings give a valid answer quickly."""
    count = 1000
    tables = np.tile(np.arange(count, dtype=np.int32), (count, 1))
    num_blocks = np.arange(1, count + 1, dtype=np.int32)
    groups = best_groups(tables, np.arange(count, dtype=np.int32), num_blocks)
    assert sum((len(rows) - 1) * blocks for rows, blocks in groups) > count


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=60), st.sampled_from([1, 4, 32]))
def test_tiles_hold_each_grouped_request_once(groups: list[int], width: int) -> None:
    prefix_lens = np.array([16, 64, 32, 48], np.int32)
    starts, lens, members = prefix_tiles(np.array(groups, np.int32), prefix_lens, width)
    assert len(lens) == len(members) <= max_tiles(len(groups), width)
    for length, tile in zip(lens, members, strict=True):
        assert tile[0] >= 0 and len({groups[r] for r in tile[tile >= 0]}) == 1
        assert all(starts[r] == length == prefix_lens[groups[r]] for r in tile[tile >= 0])
    placed = sorted(members[members >= 0].tolist())
    large = [r for r, g in enumerate(groups) if g >= 0 and groups.count(g) >= MIN_PREFIX_GROUP]
    assert placed == large == np.flatnonzero(starts).tolist()


def test_plans_name_the_rows_that_share_a_prefix_as_long_as_it_pays() -> None:
    engine = Engine(
        num_blocks=2000, max_model_len=2048, max_num_batched_tokens=4096, groups_prefixes=True
    )
    prefix = numbers(1000)
    for i in range(12):
        engine.add([*prefix, i, i], max_tokens=8 if i < 6 else 16)
    engine.add(numbers(50, start=3), max_tokens=16)
    engine.finish()
    decoding = [plan for plan in engine.plans if (plan.num_new_tokens == 1).all()]
    full = [plan for plan in decoding if len(plan.rows) == 13]
    assert full and len(decoding) > len(full)
    for plan in full:
        assert plan.prefix_blocks.tolist() == [1000 // 4]
        assert sorted(plan.prefix_groups.tolist()) == [-1] + [0] * 12
        lone = plan.rows[plan.prefix_groups == -1]
        assert lone.tolist() == [engine.plans[0].rows[-1]]
    for plan in decoding:
        if len(plan.rows) < 13:
            assert not len(plan.prefix_groups), "5 x 1000 tokens are not worth a kernel"


def test_a_row_leaves_its_group_with_its_request() -> None:
    engine = Engine(
        num_blocks=2000,
        max_model_len=2048,
        max_num_seqs=11,
        max_num_batched_tokens=4096,
        groups_prefixes=True,
    )
    prefix = numbers(1000)
    for i in range(11):
        engine.add([*prefix, i], max_tokens=2 if i == 4 else 6)
    lone = engine.add(numbers(50, start=3), max_tokens=2)
    engine.finish()
    (joining,) = (plan for plan in engine.plans[1:] if plan.added_rows)
    assert joining.added_rows[0].seed == lone
    assert joining.prefix_blocks.tolist() == [1000 // 4]
    assert joining.rows[joining.prefix_groups == -1].tolist() == [joining.added_rows[0].row]


def test_a_row_may_have_nothing_but_what_it_shares() -> None:
    """A prompt's last token is computed alone, in the step in which others that begin with this
    whole prompt join. Kernels must expect it."""
    engine = Engine(
        num_blocks=4000, max_model_len=2048, max_num_batched_tokens=999, groups_prefixes=True
    )
    prefix = numbers(1000)
    engine.add(prefix)
    for i in range(12):
        engine.add([*prefix, i])
    engine.finish()
    joining = engine.plans[1]
    assert joining.num_new_tokens.tolist() == [1] * 13
    assert joining.prefix_groups.tolist() == [0] * 13
    assert joining.prefix_blocks.tolist() == [1000 // 4]


def test_plans_say_nothing_of_prefixes_unless_asked() -> None:
    engine = Engine(num_blocks=2000, max_model_len=2048, max_num_batched_tokens=4096)
    for i in range(12):
        engine.add([*numbers(1000), i], max_tokens=4)
    engine.finish()
    assert not any(len(plan.prefix_groups) for plan in engine.plans)
