"""The block tables of all slots on the device, kept up to date by the grants of each plan."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tokamak.cache.blocks import NULL_BLOCK
from tokamak.core.plan import Grants
from tokamak.device.staging import staged


class BlockTables:
    """Per group one [slots, blocks] table; entries past a request's blocks name the null block."""

    def __init__(self, groups: int, slots: int, max_blocks: int, device: torch.device) -> None:
        self.tables: Tensor = torch.full(
            (groups, slots, max_blocks), NULL_BLOCK, dtype=torch.int32, device=device
        )
        """int32 [groups, slots, blocks]."""

    def clear(self, slot: int) -> None:
        """Let every entry of a slot name the null block: a new request takes it."""
        self.tables[:, slot].fill_(NULL_BLOCK)

    def apply(self, grants: Grants) -> None:
        """Write grants, in stream order. The fill of a step does this for those in its arena."""
        packed = np.stack([grants.groups, grants.slots, grants.entries, grants.block_ids])
        device = staged(packed, self.tables.device)
        self.tables[device[0], device[1], device[2]] = device[3]
