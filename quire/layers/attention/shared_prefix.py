"""Which requests of a decode batch share a prefix, cut into tiles for a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.protocol.plan import MIN_PREFIX_GROUP, Int32Array


@dataclass(frozen=True)
class PrefixTiles:
    """Tiles on the device. Requests are numbered among those with one new token."""

    starts: Tensor
    """int32 [requests]: tokens of each request's shared prefix, 0 for none."""
    lens: Tensor
    """int32 [tiles]: tokens that the members of a tile share; 0: unused."""
    members: Tensor
    """int32 [tiles, width]: requests; -1 pads behind the first."""


class HostPrefixTiles(NamedTuple):
    """The same on the host."""

    starts: Int32Array
    lens: Int32Array
    members: Int32Array


def max_tiles(num_requests: int, width: int) -> int:
    """Tiles that so many requests can need: full ones, and one in part for each group."""
    return num_requests // width + num_requests // MIN_PREFIX_GROUP


def prefix_tiles(groups: Int32Array, prefix_lens: Int32Array, width: int) -> HostPrefixTiles:
    """Tiles of `width` requests.

    `groups[r]` is the group of request r or -1, `prefix_lens[g]` the tokens that group g shares.
    A group with too few requests here is left out.
    """
    grouped = np.flatnonzero(groups >= 0)
    counts = np.bincount(groups[grouped], minlength=len(prefix_lens))
    counts[counts < MIN_PREFIX_GROUP] = 0
    order = grouped[counts[groups[grouped]] > 0]
    order = order[np.argsort(groups[order], kind="stable")]
    group_of = groups[order]
    tiles_of = -(-counts // width)
    first_tile, first = np.cumsum(tiles_of) - tiles_of, np.cumsum(counts) - counts
    place = np.arange(len(order)) - first[group_of]
    members = np.full((int(tiles_of.sum()), width), -1, np.int32)
    members[first_tile[group_of] + place // width, place % width] = order
    starts = np.zeros(len(groups), np.int32)
    starts[order] = prefix_lens[group_of]
    return HostPrefixTiles(starts, np.repeat(prefix_lens, tiles_of).astype(np.int32), members)
