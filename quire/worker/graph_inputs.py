"""`GraphInputs`: what a captured decode step is told, in one buffer at fixed places."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.attention.shared_prefix import HostPrefixTiles, PrefixTiles, max_tiles
from quire.protocol.plan import Int32Array
from quire.worker.staging import aligned


class GraphInputs:
    """Row numbers and, where rows share a prefix, the tiles of those: one copy per replay.

    Each graph uses the beginning of the buffer. Parts are aligned as `Staging` aligns them, so that
    graphs and other steps run the same kernels.
    """

    def __init__(
        self, max_rows: int, tile_width: int, shares_prefixes: bool, device: torch.device
    ) -> None:
        """`tile_width` is the number of members of a tile."""
        self._tile_width = tile_width
        length = self._places(max_rows)[-1].stop if shares_prefixes else max_rows
        self._buffer = torch.full((length,), -1, dtype=torch.int32, device=device)

    def _places(self, size: int) -> tuple[slice, slice, slice]:
        """Where a graph of `size` rows has its prefix starts, tile lengths and tile members."""
        tiles = max_tiles(size, self._tile_width)
        starts = aligned(size)
        lens = starts + aligned(size)
        members = lens + aligned(tiles)
        return (
            slice(starts, starts + size),
            slice(lens, lens + tiles),
            slice(members, members + tiles * self._tile_width),
        )

    def rows(self, size: int) -> Tensor:
        """-1 pads."""
        return self._buffer[:size]

    def prefixes(self, size: int) -> PrefixTiles:
        starts, lens, members = (self._buffer[place] for place in self._places(size))
        return PrefixTiles(starts, lens, members.view(len(lens), self._tile_width))

    def send(
        self,
        size: int,
        rows: Int32Array,
        shares_prefixes: bool = False,
        prefixes: HostPrefixTiles | None = None,
    ) -> None:
        """Fill the inputs of a graph, padded with rows and tiles that do nothing."""
        places = self._places(size) if shares_prefixes else ()
        length = places[-1].stop if places else size
        packed = torch.empty(length, dtype=torch.int32, pin_memory=self._buffer.is_cuda)
        host = packed.numpy()
        host[: len(rows)] = rows
        host[len(rows) : size] = -1
        if places:
            host[places[0].start : places[-1].start] = 0
        if prefixes is not None:
            for place, values in zip(places, prefixes, strict=True):
                host[place][: values.size] = values.ravel()
        self._buffer[:length].copy_(packed, non_blocking=True)
