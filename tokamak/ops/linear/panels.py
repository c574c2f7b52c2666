"""How do weights lie in memory for the compiled linear layers? In panels of 4 vectors of features.

A panel holds 4 vectors' worth of neighbouring output features, one row of the panel per input column, so
that a vector register holds neighbouring features and an input number is spread over it. Codes of 4 or 8
bits are packed in 32-bit words, one word per feature and 8 or 4 columns; a pair of neighbouring columns
sits 16 bits apart, so that one shift and mask yields both as 16-bit numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokamak.core.weight import DenseWeight, PackedWeight, ScaledWeight, Weight
from tokamak.ops.jit.language import Kernel
from tokamak.ops.jit.objects import host
from tokamak.ops.jit.values import Num, Pointer

PANEL_VECTORS = 4
FEW_ROWS = 4
CODE_BITS = {"q4": 4, "q8": 8}
PLAIN_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}

(
    X, X_STRIDE, CODES, SCALES, MINIMUMS, OUT, OUT_STRIDE, ROWS, COLUMNS, PANELS, GRAIN, SCRATCH, SCRATCH_STRIDE,
) = range(13)  # fmt: skip
PARAMETERS = 13
"""Arguments of every linear kernel; SCRATCH_STRIDE counts bytes."""


@dataclass(frozen=True, slots=True)
class Format:
    """How a packed matrix stores its numbers."""

    kind: str
    """`q4` or `q8` for codes in groups; `bf16`, `f16` or `f32` for plain numbers."""
    scale_kind: str = ""
    """Format of scales and minimums of groups: f16 where that loses nothing, else f32."""

    @property
    def name(self) -> str:
        """Such as `q4_f16` or `bf16`."""
        return "_".join(part for part in (self.kind, self.scale_kind) if part)


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix in panels."""

    format: Format
    codes: Tensor  # [panels, columns / columns per word, width] int32, or [panels, columns, width] plain
    scales: Tensor  # [panels, groups, width]
    minimums: Tensor  # [panels, groups, width]
    features: int
    columns: int

    @property
    def panels(self) -> int:
        """How many panels there are."""
        return self.codes.shape[0]

    @property
    def padded_features(self) -> int:
        """Features with those of zeros that fill the last panel."""
        return self.panels * PANEL_VECTORS * host().lanes

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Where codes, scales and minimums lie."""
        return self.codes.data_ptr(), self.scales.data_ptr(), self.minimums.data_ptr()


@dataclass(frozen=True, slots=True)
class Panel:
    """Some neighbouring vectors of one panel, while a kernel is written."""

    kernel: Kernel
    index: Num
    first: int
    """The first vector of the panel that is wanted."""
    vectors: int
    columns: Num

    def place(self, row: Num, kind: str, argument: int) -> list[Pointer]:
        """Where the wanted vectors of a row of the panel lie; row counts from the matrix's start."""
        base = self.kernel.pointer(argument, kind)
        width = PANEL_VECTORS * self.kernel.lanes
        start = base[row * width]
        return [start[(self.first + at) * self.kernel.lanes] for at in range(self.vectors)]

    def numbers(self, row: Num, kind: str, argument: int) -> list[Num]:
        """The wanted vectors of a row."""
        return [place.load(self.kernel.lanes) for place in self.place(row, kind, argument)]


def column_in_word(position: int, per_word: int) -> int:
    """Which of a word's columns the code at a position (counted from the lowest bits) belongs to."""
    half = per_word // 2
    return 2 * (position % half) + position // half


def pack_panels(weight: Weight) -> Packed:
    """Lay a weight out in panels."""
    width = PANEL_VECTORS * host().lanes
    features, columns = weight.shape
    if isinstance(weight, ScaledWeight | PackedWeight):
        weight = DenseWeight(weight.dense(torch.float32))
    if isinstance(weight, DenseWeight):
        values = weight.values if weight.values.dtype in PLAIN_KINDS else weight.values.float()
        plain = Format(PLAIN_KINDS[values.dtype])
        nothing = torch.empty(0)
        return Packed(plain, _panels(values, width), nothing, nothing, features, columns)
    kind = "q4" if weight.bits == 4 else "q8"
    per_word = 32 // CODE_BITS[kind]
    codes = _panels(weight.codes, width)
    split = codes.view(-1, columns // per_word, per_word, width)
    words = torch.zeros((split.shape[0], columns // per_word, width), dtype=torch.int32)
    for position in range(per_word):
        column = split[:, :, column_in_word(position, per_word)]
        words |= column.int() << (CODE_BITS[kind] * position)
    tables = (weight.scales, weight.minimums)
    half = all(torch.equal(table.half().float(), table) for table in tables)
    dtype = torch.float16 if half else torch.float32
    scales, minimums = (_panels(table.to(dtype), width) for table in tables)
    return Packed(Format(kind, PLAIN_KINDS[dtype]), words, scales, minimums, features, columns)


def _panels(matrix: Tensor, width: int) -> Tensor:
    """[features, columns] to [panels, columns, width], padded with zero features."""
    features, columns = matrix.shape
    panels = -(-features // width)
    if panels * width != features:
        padded = matrix.new_zeros((panels * width, columns))
        padded[:features] = matrix
        matrix = padded
    return matrix.view(panels, width, columns).transpose(1, 2).contiguous()


def tile_vectors() -> int:
    """Vectors of a tile of rows whose sums fit this machine's registers."""
    return PANEL_VECTORS if host().registers > 16 else PANEL_VECTORS // 2


def few_vectors(rows: int) -> int:
    """Vectors taken at a time when few rows run straight from the codes."""
    return PANEL_VECTORS if rows <= 2 or host().registers > 16 else PANEL_VECTORS // 2


def each_tile(kernel: Kernel, rows: Num, tile: int, write: Callable[[int, Num], None]) -> None:
    """Write `write(count, first row)` for whole tiles of rows, then for the rows left over."""
    full = rows / tile * tile
    with kernel.loop(0, full, tile) as row:
        write(tile, row)
    for left in range(1, tile):
        with kernel.when((rows - full).equals(left)):
            write(left, full)


def each_part(kernel: Kernel, item: Num, write: Callable[[Num, int, int], None]) -> None:
    """Write `write(panel, first vector, vectors)` for a work item: a panel, or half of one."""
    vectors = tile_vectors()
    parts = PANEL_VECTORS // vectors
    for part in range(parts):
        with kernel.when((item % parts).equals(part)):
            write(item / parts, part * vectors, vectors)
