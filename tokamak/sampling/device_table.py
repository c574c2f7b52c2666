"""What does a draw read of the request in each slot, on the device?

Written when a request is admitted, so that a step looks its rows up without a copy from the host.
"""

from __future__ import annotations

import numpy as np
import torch

from tokamak.device.staging import staged
from tokamak.ops.sample import TABLE_COLUMNS
from tokamak.sampling.slot_table import SlotTable


class DeviceTable:
    """A row of numbers by slot, as the op `draw_rows` reads it."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.rows = torch.zeros(slots, TABLE_COLUMNS, dtype=torch.int64, device=device)
        """Zeros, which is a temperature of 0, where the likeliest token is wanted."""
        self._draws = np.zeros(slots, np.bool_)

    def set(self, slot: int, table: SlotTable) -> None:
        """Copy a slot's parameters, behind all steps launched so far and before all later ones."""
        draws = not table.greedy[slot]
        if not draws and not self._draws[slot]:
            return
        self._draws[slot] = draws
        row = np.zeros(TABLE_COLUMNS, np.int64)
        if draws:
            numbers = table.temperature[slot], table.top_p[slot], table.min_p[slot]
            row[:3].view(np.float64)[:] = numbers
            row[3] = table.top_k[slot]
            row[4:].view(np.uint64)[0] = table.key[slot]
        self.rows[slot].copy_(staged(row, self.rows.device))
