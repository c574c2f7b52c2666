"""How many pairs, features and inputs does a program of grouped experts take at a time?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """Of one launch: pairs by features by inputs, warps, stages of the loop over inputs.

    `turned` multiplies weights with pairs instead of pairs with weights, for instructions that want
    64 rows of their first operand.
    """

    features: int
    inputs: int
    warps: int
    stages: int
    turned: bool = False


@dataclass(frozen=True, slots=True)
class GroupedTiles:
    """Tiles of both products, which have equally many pairs."""

    pairs: int
    gate_up: Tile
    down: Tile


TILES = (
    GroupedTiles(16, Tile(64, 128, 4, 5, turned=True), Tile(64, 128, 4, 3, turned=True)),
    GroupedTiles(32, Tile(64, 64, 4, 4), Tile(64, 128, 4, 3)),
    GroupedTiles(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    GroupedTiles(128, Tile(128, 64, 8, 4), Tile(256, 64, 8, 3)),
)
"""Measured on an H200 with Qwen3-30B-A3B's experts (`benchmarks/ops/gpu_moe.py --tune`)."""


SCALED_TILES = (
    GroupedTiles(16, Tile(64, 128, 4, 5, turned=True), Tile(64, 128, 4, 4, turned=True)),
    GroupedTiles(32, Tile(64, 128, 4, 4, turned=True), Tile(64, 128, 4, 4, turned=True)),
    GroupedTiles(64, Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
    GroupedTiles(64, Tile(64, 128, 4, 4), Tile(128, 128, 4, 4)),
)
"""Of 8-bit numbers: every product of a group is added to a total of its own, which takes as many registers again."""


PACKED_TILES = (
    GroupedTiles(16, Tile(64, 256, 4, 3, turned=True), Tile(128, 128, 4, 3, turned=True)),
    GroupedTiles(32, Tile(64, 256, 4, 3, turned=True), Tile(64, 256, 4, 3, turned=True)),
    GroupedTiles(64, Tile(64, 128, 4, 4, turned=True), Tile(64, 128, 4, 4, turned=True)),
    GroupedTiles(64, Tile(128, 64, 4, 3, turned=True), Tile(128, 64, 4, 3, turned=True)),
)
"""Of 4-bit numbers, which are widened in registers: as first operand they are multiplied from there.

Of 4 and of 8192 rows measured on an H200 (`benchmarks/ops/gpu_packed_experts.py --tune`), of those between by
instructions a number. 128 pairs by 128 features in 64 inputs on 8 warps gave other numbers at every call there.
"""


def _for_amd(tile: Tile) -> Tile:
    """64 KiB of local memory hold two stages of 128 features."""
    return replace(tile, features=min(tile.features, 128), stages=2)


def _all_for_amd(tiles: tuple[GroupedTiles, ...]) -> tuple[GroupedTiles, ...]:
    return tuple(
        replace(each, gate_up=_for_amd(each.gate_up), down=_for_amd(each.down)) for each in tiles
    )


AMD_TILES = _all_for_amd(TILES)
AMD_PACKED_TILES = _all_for_amd(PACKED_TILES)


def tiles_for(
    pairs: int, experts: int, dtype: torch.dtype, *, packed: bool = False
) -> GroupedTiles:
    """Tiles by how many pairs an expert has in the mean; of wide numbers fewer inputs at a time.

    dtype: of the numbers multiplied. packed: the weights have 4 bits.
    """
    mean = pairs / experts
    at = next((at for at, most in enumerate((12, 32, 96)) if mean <= most), 3)
    if dtype.itemsize == 1:
        return SCALED_TILES[at]
    if packed:
        tiles = (PACKED_TILES if torch.version.hip is None else AMD_PACKED_TILES)[at]
    else:
        tiles = (TILES if torch.version.hip is None else AMD_TILES)[at]
    if dtype.itemsize <= 2:
        return tiles
    gate_up, down = (replace(each, inputs=each.inputs // 2) for each in (tiles.gate_up, tiles.down))
    return replace(tiles, gate_up=gate_up, down=down)
