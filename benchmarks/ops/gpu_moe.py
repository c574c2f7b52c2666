"""How long do routing and experts of Qwen3-30B-A3B take on a device, in which tiles, and how far from memory's speed?

    python benchmarks/ops/gpu_moe.py [--rows 1 2 4 8 32 128 8192] [--tune]

One layer: 2,048 wide, 128 experts of 768, eight a row, bfloat16. Calls run over COPIES copies of the weights with
choices of their own, so that weights come from memory, and are replayed as one CUDA graph. Prints medians in
microseconds a call; `--tune` tries tiles of every launch first. The floor is the bytes of the experts chosen at
4.15 TB/s, and for many rows the arithmetic at 800 TFLOP/s.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor

from tokamak.ops.moe_experts import triton_few, triton_grouped, triton_pairs
from tokamak.ops.moe_experts.matrix import ExpertMatrix
from tokamak.ops.moe_experts.reference import moe_experts, scaled_experts
from tokamak.ops.moe_experts.triton import triton_moe_experts, triton_scaled_experts
from tokamak.ops.moe_experts.triton_few import FewTiles
from tokamak.ops.moe_experts.triton_grouped import GroupedTiles, Tile
from tokamak.ops.moe_route.triton import triton_moe_route
from tokamak.ops.quant_linear import ScaleBlocks
from tokamak.ops.quant_linear.cases import scaled_numbers

WIDTH, INNER, EXPERTS, CHOSEN = 2048, 768, 128, 8
BLOCKS = ScaleBlocks(128, 128)
COPIES = 4
EXPERT_BYTES = 3 * WIDTH * INNER * 2
BYTES_PER_US, FLOPS_PER_US = 4.15e6, 800e6
REPLAYS = 25

FEW_GATE_UP = ((4, 2048, 8), (2, 2048, 4), (2, 2048, 8), (4, 1024, 4), (8, 1024, 8), (8, 512, 4))
FEW_DOWN = ((8, 1024, 8), (4, 1024, 4), (4, 1024, 8), (8, 256, 4), (16, 256, 8), (4, 256, 2))
FEW_GATE_UP += ((1, 2048, 2), (4, 512, 2), (8, 2048, 8), (16, 256, 4))
FEW_DOWN += ((2, 1024, 4), (8, 512, 4), (16, 128, 4), (8, 128, 2))

SMALL = (
    Tile(16, 256, 4, 4), Tile(32, 128, 4, 3), Tile(32, 128, 4, 4), Tile(32, 128, 4, 6),
    Tile(32, 256, 4, 3), Tile(32, 256, 8, 3), Tile(64, 64, 4, 4), Tile(64, 64, 4, 6),
    Tile(64, 128, 4, 3), Tile(64, 128, 8, 3), Tile(64, 256, 8, 2), Tile(128, 64, 4, 3),
    Tile(128, 64, 8, 4), Tile(64, 64, 4, 4, True), Tile(64, 64, 4, 6, True),
    Tile(64, 128, 4, 2, True), Tile(64, 128, 4, 3, True), Tile(64, 128, 4, 5, True),
    Tile(64, 256, 4, 2, True), Tile(128, 64, 4, 3, True), Tile(128, 64, 8, 4, True),
)  # fmt: skip
LARGE = (
    Tile(64, 64, 4, 3), Tile(64, 64, 4, 4), Tile(64, 64, 8, 4), Tile(128, 32, 8, 4),
    Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 4), Tile(128, 128, 8, 2),
    Tile(256, 64, 8, 3), Tile(64, 128, 4, 3), Tile(128, 64, 8, 2),
)  # fmt: skip


def median_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds a call, of a graph of all calls replayed again and again."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for at in range(REPLAYS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if at >= 3:
            times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def attempt(label: str, calls: Sequence[Callable[[], object]], expected: Tensor) -> float:
    """The median of calls whose first result is as expected, or infinity where tiles do not fit the device."""
    try:
        found = calls[0]()
    except triton.runtime.errors.OutOfResources as error:
        print(f"    {label}: {error}".splitlines()[0][:100])
        return float("inf")
    gap = (found.float() - expected.float()).abs().max().item()
    if not gap <= 0.05 * expected.float().abs().max().item():
        print(f"    {label}: WRONG, off by {gap:.3g}")
        return float("inf")
    return median_us(calls)


def fastest(title: str, results: dict[object, float]) -> object:
    """Print the best three and the worst; the best."""
    ranked = sorted(results, key=results.__getitem__)
    print(f"  {title}")
    for each in [*ranked[:3], ranked[-1]]:
        print(f"    {results[each]:9.1f} us  {each}")
    return ranked[0]


class Layer:
    """Copies of a layer's weights, of 8 bits with a scale per block if asked for."""

    def __init__(self, *, scaled: bool) -> None:
        torch.manual_seed(0)
        self.number_bytes = 1 if scaled else 2
        make = self.scaled if scaled else self.plain
        shapes = ((EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER))
        self.gate_up, self.down = ([make(shape) for _ in range(COPIES)] for shape in shapes)

    @classmethod
    def plain(cls, shape: tuple[int, ...]) -> ExpertMatrix:
        return ExpertMatrix(cls.random(shape, shape[-1] ** -0.5))

    @staticmethod
    def scaled(shape: tuple[int, ...]) -> ExpertMatrix:
        generator = torch.Generator("cuda").manual_seed(0)
        with torch.device("cuda"):
            return ExpertMatrix(*scaled_numbers(shape, BLOCKS, generator), BLOCKS)

    @staticmethod
    def random(shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


class Work:
    """Rows and their choices, a set for every copy."""

    def __init__(self, layer: Layer, rows: int) -> None:
        self.rows, self.layer = rows, layer
        self.x = [layer.random((rows, WIDTH), 1.0) for _ in range(COPIES)]
        self.scores = [layer.random((rows, EXPERTS), 1.0) for _ in range(COPIES)]
        routed = [triton_moe_route(scores, CHOSEN, True) for scores in self.scores]
        self.ids, self.weights = [ids for ids, _ in routed], [weights for _, weights in routed]
        self.distinct = statistics.mean(len(ids.unique()) for ids in self.ids)

    def floor_us(self, share: float = 1.0) -> float:
        expert_bytes = EXPERT_BYTES / 2 * self.layer.number_bytes
        reads = share * self.distinct * expert_bytes / BYTES_PER_US
        multiplies = share * 2 * self.rows * CHOSEN * EXPERT_BYTES / 2 / FLOPS_PER_US
        return max(reads, multiplies)

    def each(self, call: Callable[[int], Tensor]) -> list[Callable[[], Tensor]]:
        return [lambda at=at: call(at) for at in range(COPIES)]


def tune_few(work: Work) -> FewTiles:
    """The best tiles of both launches."""
    layer, results = work.layer, {}
    hidden = [
        triton_few.pass_few_gate_up(work.x[at], work.ids[at], layer.gate_up[at], FewTiles())
        for at in range(COPIES)
    ]
    for features, inputs, warps in FEW_GATE_UP:
        tiles = FewTiles(gate_up_features=features, gate_up_inputs=inputs, gate_up_warps=warps)
        calls = work.each(
            lambda at, tiles=tiles: triton_few.pass_few_gate_up(
                work.x[at], work.ids[at], layer.gate_up[at], tiles
            )
        )
        results[features, inputs, warps] = attempt(f"{tiles}", calls, hidden[0])
    features, inputs, warps = fastest(
        f"few, gate and up (floor {work.floor_us(2 / 3):.1f})", results
    )
    best = FewTiles(gate_up_features=features, gate_up_inputs=inputs, gate_up_warps=warps)

    results = {}
    arguments = (hidden[0], work.ids[0], work.weights[0], layer.down[0])
    expected = triton_few.pass_few_down(*arguments, FewTiles(), torch.bfloat16)
    for features, inputs, warps in FEW_DOWN:
        tiles = FewTiles(down_features=features, down_inputs=inputs, down_warps=warps)
        calls = work.each(
            lambda at, tiles=tiles: triton_few.pass_few_down(
                hidden[at], work.ids[at], work.weights[at], layer.down[at], tiles, torch.bfloat16
            )
        )
        results[features, inputs, warps] = attempt(f"{tiles}", calls, expected)
    features, inputs, warps = fastest(f"few, down (floor {work.floor_us(1 / 3):.1f})", results)
    return replace(best, down_features=features, down_inputs=inputs, down_warps=warps)


def tune_grouped(work: Work, pairs: int, candidates: Sequence[Tile]) -> GroupedTiles:
    """The best tiles of both products for one count of pairs a tile."""
    layer = work.layer
    grouped = [triton_pairs.group_pairs(ids, EXPERTS, pairs) for ids in work.ids]
    plain = Tile(64, 64, 4, 2)
    hidden = [
        triton_grouped.pass_gate_up(
            work.x[at], CHOSEN, layer.gate_up[at], *grouped[at], pairs, plain
        )
        for at in range(COPIES)
    ]
    results: dict[object, float] = {}
    for tile in candidates:
        calls = work.each(
            lambda at, tile=tile: triton_grouped.pass_gate_up(
                work.x[at], CHOSEN, layer.gate_up[at], *grouped[at], pairs, tile
            )
        )
        results[tile] = attempt(f"{tile}", calls, hidden[0])
    gate_up = fastest(f"by {pairs}, gate and up (floor {work.floor_us(2 / 3):.1f}, ideal)", results)

    results = {}
    first = (hidden[0], work.weights[0], layer.down[0], *grouped[0], pairs)
    expected = triton_grouped.pass_down(*first, plain)
    for tile in candidates:
        calls = work.each(
            lambda at, tile=tile: triton_grouped.pass_down(
                hidden[at], work.weights[at], layer.down[at], *grouped[at], pairs, tile
            )
        )
        results[tile] = attempt(f"{tile}", calls, expected)
    down = fastest(f"by {pairs}, down (floor {work.floor_us(1 / 3):.1f})", results)

    group = median_us(
        work.each(lambda at: triton_pairs.group_pairs(work.ids[at], EXPERTS, pairs)[0])
    )
    parts = triton_grouped.pass_down(*first, plain)
    summed = median_us([lambda: triton_pairs.sum_parts(parts, CHOSEN)] * COPIES)
    print(f"    group {group:.1f} us, sum {summed:.1f} us")
    return GroupedTiles(pairs, gate_up, down)


def whole(work: Work, call: Callable[..., Tensor]) -> float:
    """Microseconds of all launches."""
    layer = work.layer
    return median_us(
        work.each(
            lambda at: call(
                work.x[at], work.ids[at], work.weights[at], layer.gate_up[at], layer.down[at]
            )
        )
    )


def chosen_forms(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertMatrix, down: ExpertMatrix
) -> Tensor:
    """What the backends of both ops run."""
    if gate_up.scales is None:
        return triton_moe_experts(x, ids, weights, gate_up.values, down.values)
    return triton_scaled_experts(x, ids, weights, *gate_up[:2], *down)


def as_defined(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: ExpertMatrix, down: ExpertMatrix
) -> Tensor:
    """What the references say."""
    if gate_up.scales is None:
        return moe_experts(x, ids, weights, gate_up.values, down.values)
    return scaled_experts(x, ids, weights, *gate_up[:2], *down)


def measure(layer: Layer, rows: int, *, tune: bool) -> str:
    """A line of the table."""
    work = Work(layer, rows)
    first = (work.x[0], work.ids[0], work.weights[0], layer.gate_up[0], layer.down[0])
    found = chosen_forms(*first)
    gap = (found.float() - as_defined(*first).float()).abs().max().item()
    tuned: dict[str, float] = {}
    if tune:
        print(f"{rows} rows, {work.distinct:.1f} experts")
        if rows <= 8:
            tiles = tune_few(work)
            tuned["few"] = whole(work, lambda *each: triton_few.experts_of_few(*each, tiles))
        if rows > 2:
            sizes = ((16, SMALL), (32, SMALL)) if rows <= 128 else ((64, LARGE), (128, LARGE))
            for pairs, candidates in sizes[: 1 if rows <= 8 else 2]:
                chosen = tune_grouped(work, pairs, candidates)
                tuned[f"by {pairs}"] = whole(
                    work,
                    lambda *each, chosen=chosen: triton_grouped.grouped_experts(*each, chosen),
                )
    route = median_us(work.each(lambda at: triton_moe_route(work.scores[at], CHOSEN, True)[0]))
    default, floor = whole(work, chosen_forms), work.floor_us()
    extra = ", ".join(f"{name} {time:.1f}" for name, time in tuned.items())
    return (
        f"{rows:>5} {work.distinct:>8.1f} {floor:>9.1f} {default:>9.1f} {floor / default:>6.0%} "
        f"{route:>7.1f} {gap:>8.1e}  {extra}"
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32, 128, 8192])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--scaled", action="store_true", help="8-bit weights and rows")
    given = parser.parse_args()
    layer = Layer(scaled=given.scaled)
    lines = [measure(layer, rows, tune=given.tune) for rows in given.rows]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(" rows  experts  floor us   us now  floor/  route       gap  best tuned, us")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
