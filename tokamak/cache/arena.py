"""The one device allocation that all sub-caches are views of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tokamak.cache.layout import ArenaLayout

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Arena:
    """Bytes on the device, and typed views onto them by sub-cache and layer."""

    def __init__(self, layout: ArenaLayout, device: torch.device) -> None:
        self.layout = layout
        # Zeroed lazily by the system on a CPU; a block that was never written reads as finite numbers.
        self._bytes = torch.zeros(layout.arena_bytes, dtype=torch.uint8, device=device)

    def views(self) -> dict[str, Sequence[Tensor]]:
        """By sub-cache: one [blocks, heads, rows a block, width] tensor a layer, in layer order."""
        views: dict[str, list[Tensor]] = {}
        for region in self.layout.regions:
            dtype = _DTYPES[region.dtype]
            region_bytes = math.prod(region.shape) * dtype.itemsize
            flat = self._bytes[region.start_bytes : region.start_bytes + region_bytes]
            views.setdefault(region.sub_cache, []).append(flat.view(dtype).view(region.shape))
        return {name: tuple(layers) for name, layers in views.items()}
