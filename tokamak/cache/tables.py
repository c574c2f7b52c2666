"""The block tables of all slots on the device, kept up to date by the grants of each plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamak.cache.blocks import NULL_BLOCK
from tokamak.core.plan import BlockGrant


class BlockTables:
    """Per group one [slots, blocks] int32 table; entries a request does not reach are stale or null."""

    def __init__(self, groups: int, slots: int, max_blocks: int, device: torch.device) -> None:
        self.tables: tuple[Tensor, ...] = tuple(
            torch.full((slots, max_blocks), NULL_BLOCK, dtype=torch.int32, device=device)
            for _ in range(groups)
        )

    def apply(self, grants: Sequence[BlockGrant]) -> None:
        """Write the grants of one plan, in stream order."""
        for grant in grants:
            row = self.tables[grant.group][grant.slot]
            ids = torch.tensor(grant.block_ids, dtype=torch.int32)
            row[grant.start : grant.start + len(grant.block_ids)] = ids.to(row.device)
