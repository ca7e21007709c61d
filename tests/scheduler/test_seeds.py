"""Seeds of children and of unseeded requests."""

from __future__ import annotations

from quire.scheduler.sequence import derive_seed, random_seed


def test_children_follow_splitmix64():
    """Published outputs of splitmix64 for the state 1234567."""
    assert derive_seed(1234567, 1) == 6457827717110365317
    assert derive_seed(1234567, 2) == 3203168211198807973


def test_the_first_child_has_its_parents_seed():
    assert derive_seed(7, 0) == 7
    assert derive_seed(-1, 0) == 2**64 - 1
    assert derive_seed(2**64 + 3, 0) == 3


def test_seeds_fit_64_bits_and_differ():
    children = {derive_seed(seed, i) for seed in range(100) for i in range(100)}
    unseeded = {random_seed(seed, i) for seed in range(100) for i in range(100)}
    assert len(children) == len(unseeded) == 100 * 100
    assert all(0 <= seed < 2**64 for seed in children | unseeded)
    assert not children & unseeded
