"""A table whose rows are looked up by number, each step a few of many. It may stay in the host's memory.

It keeps the number format it was stored in, wherever it lies; the rows that are looked up are widened.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamak.core.weight import DenseWeight, ScaledWeight, Weight
from tokamak.device.pinned import host_memory, pin
from tokamak.errors import NoBackendError
from tokamak.layers.build import Build
from tokamak.ops.engram import engram_values
from tokamak.ops.registry import REFERENCE

DRAWN_ROWS = 1 << 16
"""A larger random table is this many drawn rows, again and again: drawing all of a published one takes 400 GB."""


class Table:
    """[rows, width]: on the device, or on the host, where a CPU reads the checkpoint's file and a GPU pinned memory."""

    row_shapes: tuple[tuple[int, ...], ...] = ()
    """Matrices a token row goes through: none, as rows are looked up in it."""

    def __init__(self, build: Build, rows: int, width: int) -> None:
        """Raises NoBackendError where a GPU would read the host's memory without a kernel that can."""
        self._shape = (rows, width)
        self._dtype, self._device = build.dtype, build.device
        self._codes: Tensor | None = None
        self._scales: Tensor | None = None
        self._engram_values = build.bind(engram_values, live=True)
        self.on_host = build.host_tables and build.device.type != "meta"
        self._pins = self.on_host and build.device.type == "cuda"
        if self._pins and build.choices[engram_values.name].backend == REFERENCE:
            raise NoBackendError(
                f"engram_tables is host, and op {engram_values.name} would run as its {REFERENCE}, which reads no "
                f"memory of the host on {build.facts.name}",
                hint="install triton, leave kernels out, or use engram_tables=device",
            )

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """[rows, width], once."""
        return (self._shape,)

    def load(self, parts: Sequence[Weight]) -> None:
        """Take the one part: all rows, or those that `draw` drew."""
        (part,) = parts
        whole, drawn = self._shape, (min(self._shape[0], DRAWN_ROWS), self._shape[1])
        assert part.shape in (whole, drawn), f"a table of {part.shape} for {whole}"
        if isinstance(part, ScaledWeight) and _has_groups_of_rows(part):
            self._codes, self._scales = self._placed(part.codes), self._placed(part.scales)
        else:
            stored = part.values if isinstance(part, DenseWeight) else part.dense(self._dtype)
            self._codes, self._scales = self._placed(stored), None

    def draw(self, generator: torch.Generator) -> list[Weight]:
        """Normal numbers, for as many rows as are drawn."""
        rows = min(self._shape[0], DRAWN_ROWS)
        numbers = torch.randn((rows, self._shape[1]), generator=generator)
        return [DenseWeight(numbers.to(self._dtype))]

    def read(self, rows: Tensor, out: Tensor) -> None:
        """Leave the rows of these numbers, int64 [n], in `out`, [n, width]."""
        assert self._codes is not None, "a table was read before it was loaded"
        self._engram_values(self._codes, self._scales, rows, out)

    def _placed(self, numbers: Tensor) -> Tensor:
        """All rows where the table lies; on the host of a CPU that is where they are, such as in a mapped file."""
        rows = self._shape[0]
        if len(numbers) == rows and not self._pins:
            copies = self._device.type == "cpu" and not self.on_host
            return numbers.clone() if copies else numbers.to(self._device).contiguous()
        shape = (rows, *numbers.shape[1:])
        if not self.on_host:
            return _filled(torch.empty(shape, dtype=numbers.dtype, device=self._device), numbers)
        found = _filled(host_memory(shape, numbers.dtype), numbers.cpu())
        return pin(found) if self._pins else found


def _filled(out: Tensor, numbers: Tensor) -> Tensor:
    """`out` with rows of numbers from its start, again and again. Bytes are copied, as some formats know no other op."""
    place, given = out.view(torch.uint8), numbers.contiguous().view(torch.uint8)
    for part in place.split(len(given)):
        part.copy_(given[: len(part)])
    return out


def _has_groups_of_rows(weight: ScaledWeight) -> bool:
    """Whether scales hold for equally many neighbours of one row."""
    return weight.block[0] == 1 and weight.scales.shape[1] * weight.block[1] == weight.shape[1]
