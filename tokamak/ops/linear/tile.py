"""How does a kernel for few rows divide a weight, and for how many rows is it the faster way?

A table of what was measured on an H200 says so, else rules. Nothing is timed when a model starts: the same
weight gets the same tile on every start.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a weight that a program takes at a time."""

    features: int
    """Rows of the weight a program multiplies; of gate and of up as many each."""
    columns: int
    """Columns taken at a time: by the program on vector arithmetic, by every warp on tensor cores."""
    warps: int
    stages: int = 0
    """Tiles under way at a time on tensor cores; 0 is vector arithmetic, all of whose tiles are under way."""
    overlaps: bool = False
    """Whether the kernel gains from beginning before its predecessor ends, on chips where it can."""
    registers: bool = False
    """Whether tensor cores get their operands from memory without a stop in shared memory, where a chip can."""

    def divides(self, features: int, columns: int) -> bool:
        """Whether programs of this tile take a whole weight and nothing else."""
        taken = self.columns * self.warps if self.stages or self.registers else self.columns
        return features % self.features == 0 and columns % taken == 0


LANE_COLUMNS = 8
"""Numbers of 16 bits a lane loads at a time: 16 bytes."""
WARP_COLUMNS = 32 * LANE_COLUMNS
MOST_PROGRAMS = 2048
"""Programs of 4 warps that fit an H200 at once, about."""
CLASSES = (1, 2, 4, 8, 16, 32)
"""Numbers of rows that kernels are compiled for."""
WIDE_ROWS = 8
"""The most rows of float32, which no tensor cores multiply."""
SMALL_WEIGHT = 1 << 24
"""Numbers of a weight up to which 9 to 16 rows gain more from one kernel than from the library's product."""

MEASURED: dict[tuple[int, int, int, bool], Tile] = {
    # Qwen3 0.6B: queries, keys and values; output; gate and up; down; head.
    (1, 4096, 1024, False): Tile(2, 1024, 2, overlaps=True),
    (2, 4096, 1024, False): Tile(16, 256, 4, overlaps=True, registers=True),
    (8, 4096, 1024, False): Tile(16, 256, 4, overlaps=True, registers=True),
    (16, 4096, 1024, False): Tile(16, 256, 4, overlaps=True, registers=True),
    (1, 1024, 2048, False): Tile(4, 2048, 8, overlaps=True),
    (2, 1024, 2048, False): Tile(16, 256, 8, overlaps=True, registers=True),
    (8, 1024, 2048, False): Tile(16, 256, 8, overlaps=True, registers=True),
    (16, 1024, 2048, False): Tile(16, 256, 8, overlaps=True, registers=True),
    (1, 6144, 1024, True): Tile(2, 1024, 2, overlaps=True),
    (2, 6144, 1024, True): Tile(16, 256, 4, overlaps=True, registers=True),
    (8, 6144, 1024, True): Tile(16, 256, 4, overlaps=True, registers=True),
    (16, 6144, 1024, True): Tile(16, 128, 4, overlaps=True, registers=True),
    (1, 1024, 3072, False): Tile(4, 2048, 8, overlaps=True),
    (2, 1024, 3072, False): Tile(16, 128, 8, overlaps=True, registers=True),
    (8, 1024, 3072, False): Tile(16, 128, 8, overlaps=True, registers=True),
    (16, 1024, 3072, False): Tile(16, 256, 4, overlaps=True, registers=True),
    (1, 151936, 1024, False): Tile(4, 512, 2, overlaps=True),
    (2, 151936, 1024, False): Tile(4, 256, 1),
    (8, 151936, 1024, False): Tile(16, 256, 2, overlaps=True, registers=True),
    # Llama 3 8B, likewise.
    (1, 6144, 4096, False): Tile(4, 2048, 8, overlaps=True),
    (8, 6144, 4096, False): Tile(16, 128, 4, overlaps=True, registers=True),
    (1, 4096, 4096, False): Tile(4, 2048, 8, overlaps=True),
    (8, 4096, 4096, False): Tile(16, 128, 4, 3),
    (1, 28672, 4096, True): Tile(1, 4096, 4, overlaps=True),
    (1, 4096, 14336, False): Tile(4, 1024, 4, overlaps=True),
    (8, 4096, 14336, False): Tile(16, 128, 4, 3),
    (1, 128256, 4096, False): Tile(4, 2048, 8, overlaps=True),
    (8, 128256, 4096, False): Tile(64, 64, 4, 3),
    # Qwen3 30B with 3B active: queries, keys and values; output; router; head.
    (1, 5120, 2048, False): Tile(2, 1024, 4, overlaps=True),
    (2, 5120, 2048, False): Tile(4, 1024, 4, overlaps=True),
    (8, 5120, 2048, False): Tile(16, 256, 4, overlaps=True, registers=True),
    (16, 5120, 2048, False): Tile(16, 128, 2, overlaps=True, registers=True),
    (1, 2048, 4096, False): Tile(4, 2048, 8, overlaps=True),
    (2, 2048, 4096, False): Tile(4, 2048, 8, overlaps=True),
    (8, 2048, 4096, False): Tile(16, 256, 8, overlaps=True, registers=True),
    (16, 2048, 4096, False): Tile(16, 64, 4, 6),
    (1, 128, 2048, False): Tile(4, 2048, 8, overlaps=True),
    (2, 128, 2048, False): Tile(2, 2048, 8, overlaps=True),
    (8, 128, 2048, False): Tile(16, 256, 4, overlaps=True, registers=True),
    (16, 128, 2048, False): Tile(16, 256, 4, overlaps=True, registers=True),
    (1, 151936, 2048, False): Tile(2, 1024, 4, overlaps=True),
    (2, 151936, 2048, False): Tile(4, 1024, 4, overlaps=True),
    (8, 151936, 2048, False): Tile(64, 64, 4, 3),
}
"""Tiles by row class, features, columns and whether the weight is gate and up; 2 and 4 may take those of 8.

They make the chain of a step fastest, which is not always what makes a product alone so: kernels of one kind
begin sooner behind each other than kernels of two.
"""

FUSED_ROWS: dict[tuple[int, int, bool], int] = {
    (151936, 1024, False): 8,
    (6144, 4096, False): 8,
    (4096, 4096, False): 8,
    (28672, 4096, True): 1,
    (4096, 14336, False): 8,
    (128256, 4096, False): 8,
    (151936, 2048, False): 8,
}
"""The most rows for which kernels made the chain of a step faster than the library's product and its neighbours."""

NORMED_ROWS: dict[tuple[int, int, bool], int] = {}
"""The most rows for which a kernel norms them itself faster than a kernel in front of it does."""
MOST_NORMED = 16
"""The same for other weights: every program of a product norms all rows again."""


def row_class(rows: int) -> int:
    """The number of rows that the kernel for `rows` is compiled for."""
    return next(each for each in CLASSES if rows <= each)


def fused_rows(features: int, columns: int, *, gated: bool = False) -> int:
    """The most rows for which a kernel takes the neighbours of a product along; more are the library's."""
    measured = FUSED_ROWS.get((features, columns, gated))
    if measured is not None:
        return measured
    return 16 if features * columns <= SMALL_WEIGHT else 8


def normed_rows(features: int, columns: int, *, gated: bool = False) -> int:
    """The most rows that a kernel which takes the neighbours of a product along norms itself."""
    most = NORMED_ROWS.get((features, columns, gated), MOST_NORMED)
    return min(most, fused_rows(features, columns, gated=gated))


def tile_for(
    rows: int, features: int, columns: int, *, gated: bool = False, registers: bool = False
) -> Tile:
    """The tile of a [features, columns] weight for products with 1 to 32 rows.

    registers: whether the chip has kernels for tiles of that name; else one of another kind is found.
    """
    least = row_class(rows)
    for each in CLASSES:
        if least <= each <= max(least, 8) and (least > 1 or each == 1):
            measured = MEASURED.get((each, features, columns, gated))
            if measured is not None and (registers or not measured.registers):
                return measured
    parts = features // 2 if gated else features
    return _one_row(parts, columns, gated=gated) if rows == 1 else _several_rows(parts, gated=gated)


def wide_tile(columns: int) -> Tile:
    """The tile of a float32 weight: such matrices are routers and gates, whose features are few."""
    warps = 4 if columns >= 4 * WARP_COLUMNS else 1
    return Tile(1, warps * WARP_COLUMNS, warps, overlaps=True)


def _one_row(features: int, columns: int, *, gated: bool) -> Tile:
    """Programs small enough that all of them run at once where that leaves each enough bytes under way."""
    if not gated and columns >= 8 * WARP_COLUMNS and features <= 2 * MOST_PROGRAMS:
        # Few features: all columns at once, and no more features than keep every processor busy.
        return Tile(1 if features < 512 else 4, 8 * WARP_COLUMNS, 8, overlaps=True)
    warps = 4 if columns >= 4 * WARP_COLUMNS else 2 if columns >= 2 * WARP_COLUMNS else 1
    each = 2 if features <= 2 * MOST_PROGRAMS or gated else 4
    return Tile(each, warps * WARP_COLUMNS, warps, overlaps=True)


def _several_rows(features: int, *, gated: bool) -> Tile:
    """Tensor cores take 16 features at least; a wider tile reads the rows of x less often."""
    each = 64 if features >= 65536 else 16 if features < 4096 and not gated else 32
    return Tile(each, 64, 4, 3 if each == 64 else 4)
