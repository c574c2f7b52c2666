"""The one device allocation that all sub-caches are views of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokamak.cache.layout import ArenaLayout

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "uint8": torch.uint8,
}


class Arena:
    """Bytes on the device, and typed views onto them by sub-cache and layer."""

    def __init__(self, layout: ArenaLayout, device: torch.device) -> None:
        self.layout = layout
        self._bytes = _zeros(layout.arena_bytes, device)

    def views(self) -> dict[str, Sequence[Tensor]]:
        """By sub-cache: one [blocks, heads, rows a block, width] tensor a layer, in layer order."""
        views: dict[str, list[Tensor]] = {}
        for region in self.layout.regions:
            dtype = _DTYPES[region.dtype]
            region_bytes = math.prod(region.shape) * dtype.itemsize
            flat = self._bytes[region.start_bytes : region.start_bytes + region_bytes]
            views.setdefault(region.sub_cache, []).append(flat.view(dtype).view(region.shape))
        return {name: tuple(layers) for name, layers in views.items()}


def _zeros(size: int, device: torch.device) -> Tensor:
    """Zeroed bytes, so that a row nobody wrote reads as finite numbers.

    On a CPU the pages come from the system, which zeroes each when it is first touched: an arena of
    gigabytes costs nothing until blocks are used. torch.zeros would write them all.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(size, dtype=np.uint8))
    return torch.zeros(size, dtype=torch.uint8, device=device)
