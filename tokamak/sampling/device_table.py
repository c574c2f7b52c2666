"""What does a draw read of the request in each slot, on the device?

Written when a request is admitted, so that a step looks its rows up without a copy from the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokamak.device.staging import staged
from tokamak.sampling.noise import uniforms_of
from tokamak.sampling.slot_table import SlotTable

COLUMNS = 5
"""Temperature, top-p and min-p as the bits of float64, then top-k and the request's key."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """What some rows need to draw, on the scores' device. All [rows, 1]."""

    temperature: Tensor  # float64
    top_p: Tensor  # float64, 1 where off
    min_p: Tensor  # float64, 0 where off
    top_k: Tensor  # int64, vocab where off
    uniforms: Tensor  # float64, in [0, 1)

    def at(self, rows: Tensor) -> Numbers:
        """The same for some of the rows. rows: [some] int64."""
        return Numbers(
            self.temperature[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.top_k[rows],
            self.uniforms[rows],
        )


class DeviceTable:
    """A row of numbers by slot."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._rows = torch.zeros(slots, COLUMNS, dtype=torch.int64, device=device)

    def set(self, slot: int, table: SlotTable) -> None:
        """Copy a slot's parameters, behind all steps launched so far and before all later ones."""
        row = np.empty(COLUMNS, np.int64)
        row[:3].view(np.float64)[:] = table.temperature[slot], table.top_p[slot], table.min_p[slot]
        row[3] = table.top_k[slot]
        row[4:].view(np.uint64)[0] = table.key[slot]
        self._rows[slot].copy_(staged(row, self._rows.device))

    def numbers(self, slots: Tensor, positions: Tensor) -> Numbers:
        """What rows in these slots draw with at these positions. slots, positions: [rows] integers."""
        rows = self._rows.index_select(0, slots)
        floats = rows[:, :3].view(torch.float64)
        return Numbers(
            temperature=floats[:, 0:1],
            top_p=floats[:, 1:2],
            min_p=floats[:, 2:3],
            top_k=rows[:, 3:4],
            uniforms=uniforms_of(rows[:, 4:5], positions[:, None]),
        )
