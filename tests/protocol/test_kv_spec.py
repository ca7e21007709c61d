"""KV groups: layers by lifetime, blocks of the same size in all of them."""

from __future__ import annotations

import pytest

from quire.protocol.kv_spec import PAD_LAYER, KVGroup, KVLayout, KVSpec, kv_groups

FULL, NEAR = KVSpec(2, 8, "float16"), KVSpec(2, 8, "float16", window=1024)


def test_layers_of_one_lifetime_are_one_group() -> None:
    assert kv_groups([FULL] * 5) == (KVGroup(None, (0, 1, 2, 3, 4)),)
    assert kv_groups([NEAR] * 3) == (KVGroup(1024, (0, 1, 2)),)


def test_groups_are_as_long_as_the_shortest_list_of_layers() -> None:
    """As in Gemma 3 27B: five layers with a window, then one without, 62 in all."""
    specs = [FULL if layer % 6 == 5 else NEAR for layer in range(62)]
    layout = KVLayout.of(specs, block_size=16)
    assert [group.window for group in layout.groups].count(None) == 1
    assert len(layout.groups) == 7 and layout.num_slots == 10
    members = [layer for group in layout.groups for layer in group.layers]
    assert members.count(PAD_LAYER) == 8
    assert sorted(layer for layer in members if layer != PAD_LAYER) == list(range(62))
    assert layout.bytes_per_block == 10 * 16 * 2 * 2 * 8 * 2


def test_a_slot_has_room_for_the_largest_of_its_layers() -> None:
    wide = KVSpec(4, 8, "float16", window=64)
    layout = KVLayout.of([FULL, wide, FULL, wide], block_size=4)
    assert layout.bytes_per_block == 2 * 4 * wide.bytes_per_token


@pytest.mark.parametrize(("num_tokens", "expected"), [(100, 7), (4096, 256), (32_000, 385)])
def test_a_window_bounds_what_a_sequence_holds(num_tokens: int, expected: int) -> None:
    """Mistral's window of 4,096 tokens and steps of 2,048: at most both, and a block for the
    edges, instead of 2,000 blocks for 32,000 tokens."""
    layout = KVLayout.of([KVSpec(8, 128, "bfloat16", window=4096)] * 32, block_size=16)
    assert layout.most_blocks(num_tokens, max_step_tokens=2048) == expected
