"""How fast are products with 8-bit weights on a GPU, tile by tile, beside PyTorch's own and plain bfloat16?

    PYTHONPATH=. python benchmarks/ops/gpu_quant_linear.py [--rows 1 8 32 128 2048 8192] [--tune]

Matrices are those of Llama 3 8B, a scale per 128 x 128 numbers, each in as many copies as it takes to come from
memory; calls are recorded in one CUDA graph, a figure is the median of replays for one call. "torch" is
`scaled_mm` with a scale per 128 columns of a row, rows rounded by our kernel, where PyTorch has it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import product

import torch
import triton
from torch import Tensor
from torch.nn import functional

from tokamak.ops.case import difference
from tokamak.ops.quant_linear import ScaleBlocks, library, scaled_linear
from tokamak.ops.quant_linear.cases import scaled_numbers
from tokamak.ops.quant_linear.triton import triton_scaled_linear
from tokamak.ops.quant_linear.triton_few import FEW_ROWS, FewTile, multiply_few
from tokamak.ops.quant_linear.triton_many import ManyTile, multiply_many
from tokamak.ops.quantize.triton_rows import triton_quantize_rows

BLOCKS = ScaleBlocks(128, 128)
MATRICES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
CACHE_BYTES = 200 << 20
BYTES_PER_US, FLOPS_PER_US = 4.15e6, 1.31e9
FEW = [FewTile(*each) for each in product((32, 64, 128), (4,), (3, 5), (1, 2, 4, 8))]
FEW += [FewTile(*each, 0) for each in product((1, 2, 4, 8), (2, 4, 8))]
MANY = [
    ManyTile(*each)
    for each in ((64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3), (128, 128, 8, 4), (64, 256, 8, 3), (128, 256, 8, 3))
]  # fmt: skip


def median_us(calls: list[Callable[[], object]]) -> float:
    """Microseconds of one call, all recorded in one graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for at in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if at >= 3:
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def library_product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """PyTorch's product of rows, rounded by our kernel."""
    return library.multiply(*triton_quantize_rows(x, 128, False), codes, scales)


def measure(name: str, rows: int, *, tune: bool) -> None:
    """Print a line, and the best tiles."""
    features, columns = MATRICES[name]
    copies = max(2, CACHE_BYTES // (features * columns) + 1)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.device("cuda"):
        weights = [scaled_numbers((features, columns), BLOCKS, generator) for _ in range(copies)]
        x = torch.randn((rows, columns), generator=generator).bfloat16()
    expected = scaled_linear(x[:64], *weights[0], BLOCKS, torch.bfloat16)
    ours = triton_scaled_linear(x, *weights[0], BLOCKS, torch.bfloat16)
    gap = difference([ours[:64]], [expected])
    times = {
        "ours": median_us(
            [lambda w=w: triton_scaled_linear(x, *w, BLOCKS, torch.bfloat16) for w in weights]
        )
    }
    if library.takes(rows, columns, BLOCKS, torch.bfloat16) and library.agrees(x.device):
        times["torch"] = median_us([lambda w=w: library_product(x, *w) for w in weights])
    plain = [codes.bfloat16() for codes, _ in weights[: max(2, len(weights) // 2)]]
    times["bf16"] = median_us([lambda w=w: functional.linear(x, w) for w in plain])
    rounding = median_us([lambda: triton_quantize_rows(x, 128, False)] * 4)
    floor = max(features * columns / BYTES_PER_US, 2 * rows * features * columns / FLOPS_PER_US)
    shown = ", ".join(f"{key} {time:.1f}" for key, time in times.items())
    print(
        f"{name:8} {rows:5} rows: floor {floor:.1f}, {shown}, rounding {rounding:.1f} us; gap {gap:.4f}",
        flush=True,
    )
    if tune:
        print("   " + "; ".join(best_tiles(x, weights)), flush=True)


def best_tiles(x: Tensor, weights: list[tuple[Tensor, Tensor]]) -> list[str]:
    """The best three tiles, as text."""
    out = torch.empty((x.shape[0], weights[0][0].shape[0]), dtype=torch.bfloat16, device="cuda")
    results: dict[object, float] = {}
    rounded = triton_quantize_rows(x, 128, False)
    for tile in FEW if x.shape[0] <= FEW_ROWS else ():
        if (x.shape[0] == 1) == (not tile.stages):
            calls = [
                lambda w=w, tile=tile: multiply_few(*rounded, *w, BLOCKS, 128, out, tile)
                for w in weights
            ]
            results[tile] = attempt(calls)
    for tile in MANY if x.shape[0] > 16 else ():
        calls = [
            lambda w=w, tile=tile: multiply_many(*rounded, *w, BLOCKS, 128, out, tile)
            for w in weights
        ]
        results[tile] = attempt(calls)
    ranked = sorted(results, key=results.__getitem__)
    return [f"{results[each]:.1f} {each}" for each in ranked[:4]]


def attempt(calls: list[Callable[[], object]]) -> float:
    """The median, or infinity where a tile does not fit the device."""
    try:
        return median_us(calls)
    except triton.runtime.errors.OutOfResources:
        return float("inf")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 2048, 8192])
    parser.add_argument("--matrices", nargs="+", default=[*MATRICES])
    parser.add_argument("--tune", action="store_true")
    given = parser.parse_args()
    for name in given.matrices:
        for rows in given.rows:
            measure(name, rows, tune=given.tune)


if __name__ == "__main__":
    main()
