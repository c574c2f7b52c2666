"""How long do experts of 4 bits at DeepSeek V4.1 Flash's sizes take on a device, launch by launch, in which tiles?

    PYTHONPATH=. python benchmarks/ops/gpu_packed_experts.py [--rows 1 4 16 64 8192] [--experts 96] [--tune]

One layer of a rank: 5,120 wide, 96 experts of 2,304, six a row, MXFP4 weights, rows in bfloat16 rounded by 32. Calls run
over COPIES copies of weights and choices, so that weights come from memory, and are replayed as one CUDA graph. Prints
medians in microseconds a call; `--tune` tries tiles of both products first and adds the op in the best of them. The
floor is the bytes of codes and scales of the experts chosen at 4.15 TB/s, and the arithmetic at 800 TFLOP/s. With up to
64 rows the result is compared with the reference.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
import triton
from torch import Tensor

from benchmarks.ops.gpu_moe import BYTES_PER_US, FLOPS_PER_US, attempt, fastest, median_us
from tokamak.core.minifloat import UE8M0
from tokamak.ops.moe_experts import packed_experts_limited
from tokamak.ops.moe_experts.matrix import ExpertMatrix, as_multiplied
from tokamak.ops.moe_experts.tiles import GroupedTiles, Tile, tiles_for
from tokamak.ops.moe_experts.triton_grouped import grouped_experts, pass_down, pass_gate_up
from tokamak.ops.moe_experts.triton_pairs import group_pairs, sum_parts

WIDTH, INNER, CHOSEN, ROUNDED, LIMIT = 5120, 2304, 6, 32, 10.0
EXPERT_NUMBERS = 3 * WIDTH * INNER
NUMBER_BYTES = 17 / 32
COPIES = 2
MANY_ROWS = 512

SMALL = (
    Tile(64, 128, 4, 3, True), Tile(64, 128, 4, 4, True), Tile(64, 128, 4, 6, True),
    Tile(64, 256, 4, 2, True), Tile(64, 256, 4, 3, True), Tile(64, 256, 4, 4, True),
    Tile(64, 256, 4, 5, True),
    Tile(128, 128, 4, 3, True), Tile(128, 128, 4, 4, True), Tile(128, 128, 8, 4, True),
    Tile(128, 256, 8, 2, True), Tile(128, 256, 8, 3, True), Tile(128, 256, 8, 4, True),
    Tile(32, 256, 4, 4), Tile(32, 256, 8, 4),
)  # fmt: skip
LARGE = {
    128: (
        Tile(64, 64, 4, 4, True), Tile(64, 128, 4, 2, True), Tile(128, 128, 8, 2, True),
        Tile(128, 64, 8, 4),
    ),
    64: (
        Tile(64, 128, 4, 4, True), Tile(64, 128, 4, 3, True), Tile(128, 128, 8, 3, True),
        Tile(128, 64, 4, 3, True), Tile(64, 256, 4, 2, True), Tile(128, 64, 8, 3),
    ),
}  # fmt: skip


class Work:
    """Copies of a layer's weights, of rows and of their choices."""

    def __init__(self, rows: int, experts: int, layers: list[list[ExpertMatrix]]) -> None:
        self.rows, self.layers = rows, layers
        self.x = torch.randn((COPIES, rows, WIDTH), device="cuda").bfloat16()
        scores = torch.rand((COPIES, rows, experts), device="cuda")
        self.ids = scores.topk(CHOSEN).indices.int()
        self.weights = torch.rand((COPIES, rows, CHOSEN), device="cuda") / CHOSEN
        self.distinct = statistics.mean(len(ids.unique()) for ids in self.ids)

    def floor_us(self, share: float = 1.0) -> float:
        reads = self.distinct * EXPERT_NUMBERS * NUMBER_BYTES / BYTES_PER_US
        multiplies = 2 * self.rows * CHOSEN * EXPERT_NUMBERS / FLOPS_PER_US
        return share * max(reads, multiplies)

    def arguments(self, at: int) -> tuple[Tensor, Tensor, Tensor, ExpertMatrix, ExpertMatrix]:
        up, down = self.layers[at]
        return self.x[at], self.ids[at], self.weights[at], up, down

    def whole(self, tiles: GroupedTiles | None) -> float:
        """Microseconds of all launches."""
        run = partial(grouped_experts, tiles=tiles, limit=LIMIT)
        return median_us([partial(run, *self.arguments(at)) for at in range(COPIES)])

    def gap(self) -> float:
        """How far the op is from its reference, over the reference's largest number."""
        x, ids, weights, up, down = self.arguments(0)
        expected = packed_experts_limited.reference(
            x, ids, weights, up.values, up.pointer.view(UE8M0), down.values,
            down.pointer.view(UE8M0), ROUNDED, LIMIT,
        )  # fmt: skip
        found = grouped_experts(x, ids, weights, up, down, limit=LIMIT)
        gap = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
        return gap.item()


def random_matrix(experts: int, features: int, columns: int) -> ExpertMatrix:
    """Codes of any kind, and scales that keep numbers about 1 / sqrt(columns)."""
    codes = torch.randint(256, (experts, features, columns // 2), dtype=torch.uint8, device="cuda")
    shape = (experts, features, columns // 32)
    scales = torch.randint(118, 122, shape, dtype=torch.uint8, device="cuda")
    return ExpertMatrix(codes, scales, None, ROUNDED)


def launches(work: Work, tiles: GroupedTiles) -> dict[str, float]:
    """Microseconds of each launch; products with the rounding of their rows, which comes alone as well."""
    up, down = work.layers[0]
    every = range(COPIES)
    grouped = [group_pairs(ids, len(up.values), tiles.pairs) for ids in work.ids]
    to_hidden = [
        partial(pass_gate_up, work.x[at], CHOSEN, work.layers[at][0], *grouped[at], tiles.pairs,
                tiles.gate_up, work.weights[at], LIMIT)
        for at in every
    ]  # fmt: skip
    hidden = [call() for call in to_hidden]
    to_parts = [
        partial(pass_down, hidden[at], work.weights[at], work.layers[at][1], *grouped[at],
                tiles.pairs, tiles.down, LIMIT)
        for at in every
    ]  # fmt: skip
    parts = [call() for call in to_parts]
    return {
        "group": median_us([partial(group_pairs, work.ids[at], len(up.values), tiles.pairs) for at in every]),
        "round x": median_us([partial(as_multiplied, work.x[at], up) for at in every]),
        "gate up": median_us(to_hidden),
        "round hidden": median_us([partial(as_multiplied, each, down) for each in hidden]),
        "down": median_us(to_parts),
        "sum": median_us([partial(sum_parts, each, CHOSEN) for each in parts]),
    }  # fmt: skip


def tune(work: Work, pairs: int, candidates: tuple[Tile, ...]) -> GroupedTiles:
    """The best tiles of both products for one count of pairs a tile."""
    experts = len(work.layers[0][0].values)
    grouped = [group_pairs(ids, experts, pairs) for ids in work.ids]
    every, plain = range(COPIES), candidates[0]

    def up(at: int, tile: Tile) -> Tensor:
        matrix, weights = work.layers[at][0], work.weights[at]
        return pass_gate_up(work.x[at], CHOSEN, matrix, *grouped[at], pairs, tile, weights, LIMIT)

    hidden = [up(at, plain) for at in every]

    def down(at: int, tile: Tile) -> Tensor:
        matrix, weights = work.layers[at][1], work.weights[at]
        return pass_down(hidden[at], weights, matrix, *grouped[at], pairs, tile, LIMIT)

    chosen = []
    for title, call, share in (("gate and up", up, 2 / 3), ("down", down, 1 / 3)):
        expected = call(0, plain)
        results: dict[object, float] = {
            tile: attempt(f"{tile}", [partial(call, at, tile) for at in every], expected)
            for tile in candidates
        }
        floor = work.floor_us(share)
        chosen.append(
            fastest(f"by {pairs}, {title} (floor {floor:.1f}, without rounding)", results)
        )
    return GroupedTiles(pairs, *chosen)


def measure(work: Work, *, tuned: bool) -> str:
    """A line of the table."""
    experts = len(work.layers[0][0].values)
    tiles = tiles_for(work.ids[0].numel(), experts, work.x.dtype, packed=True)
    extra = ""
    if tuned:
        print(f"{work.rows} rows, {work.distinct:.1f} experts")
        sizes = {16: SMALL} if work.rows < MANY_ROWS else LARGE
        for pairs, candidates in sizes.items():
            best = tune(work, pairs, candidates)
            extra += f"  by {pairs} {work.whole(best):.1f}"
    parts = ", ".join(f"{name} {time:.1f}" for name, time in launches(work, tiles).items())
    gap = f"{work.gap():.1e}" if work.rows <= 64 else "-"
    now, floor = work.whole(None), work.floor_us()
    return (
        f"{work.rows:>5} {work.distinct:>8.1f} {floor:>9.1f} {now:>9.1f} {floor / now:>6.0%} "
        f"{gap:>8}  {parts}{extra}"
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Experts of 4 bits, launch by launch.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 8192])
    parser.add_argument("--experts", type=int, default=96)
    parser.add_argument("--tune", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    layers = [
        [random_matrix(given.experts, 2 * INNER, WIDTH), random_matrix(given.experts, WIDTH, INNER)]
        for _ in range(COPIES)
    ]
    lines = [measure(Work(rows, given.experts, layers), tuned=given.tune) for rows in given.rows]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(" rows  experts  floor us   us now  floor/      gap  launches; best tuned, us")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
