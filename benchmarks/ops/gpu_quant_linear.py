"""How fast are products with 8-bit weights on a GPU, tile by tile, beside PyTorch's own and plain bfloat16?

    PYTHONPATH=. python benchmarks/ops/gpu_quant_linear.py [--model llama | v41] [--rows 1 4 16] [--matrices qkv out] [--tune]

Matrices are those of Llama 3 8B, a scale per 128 x 128 numbers, or of a layer of DeepSeek V4.1, a power of two per
32 x 32; each in as many copies as it takes to come from memory. Calls are recorded in one CUDA graph, a figure is the
median of replays for one call. "torch" is `scaled_mm` with a scale per 128 columns of a row, rows rounded by our kernel,
where PyTorch has it. The floor is the bytes of codes at 4.15 TB/s, or the arithmetic at what matrix units reach.
`--tune` compiles tiles in processes beside each other first, and shows the best of each matrix, the best one last.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
import triton
from torch import Tensor
from torch.nn import functional

from tokamak.ops.case import difference
from tokamak.ops.quant_linear import ScaleBlocks, group_of, library, scaled_linear, triton_words
from tokamak.ops.quant_linear.cases import scaled_numbers
from tokamak.ops.quant_linear.triton import triton_scaled_linear
from tokamak.ops.quant_linear.triton_few import FEW_ROWS, FewTile, add_parts, multiply_few
from tokamak.ops.quant_linear.triton_many import ManyTile, multiply_many
from tokamak.ops.quant_linear.triton_words import A_WORD, WordsTile, multiply_words
from tokamak.ops.quantize.triton import fake_fp8_in_order
from tokamak.ops.quantize.triton_rows import triton_quantize_rows

DEVICE = "cuda"
CACHE_BYTES = 200 << 20
BYTES_PER_US = 4.15e6
MANY_ROWS = 512
SHOWN = 4
COMPILERS = 12
FEW = [FewTile(*each) for each in product((32, 64, 128), (4,), (3, 5), (1, 2, 4, 8))]
ONE = [FewTile(*each, 0) for each in product((1, 2, 4, 8), (2, 4, 8))]
MANY = [
    ManyTile(*each)
    for each in ((64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3), (128, 128, 8, 4), (64, 256, 8, 3), (128, 256, 8, 3))
]  # fmt: skip
FEW_WORDS = (
    (64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (64, 256, 4, 2), (128, 128, 4, 4),
    (128, 128, 8, 4), (64, 64, 4, 6),
)  # fmt: skip
"""Features, columns at a time, warps and stages, for as many programs as are chosen without them."""
MANY_WORDS = [
    WordsTile(*each)
    for each in ((256, 64, 64, 4, 3), (128, 64, 64, 4, 4), (128, 128, 64, 4, 3), (128, 128, 128, 8, 3), (256, 128, 64, 8, 4), (128, 256, 64, 8, 3))
]  # fmt: skip


@dataclass(frozen=True)
class Model:
    """What is measured: how scales lie, matrices [features, columns], rows, what matrix units reach in a microsecond."""

    blocks: ScaleBlocks
    matrices: dict[str, tuple[int, int]]
    rows: tuple[int, ...]
    flops_per_us: float


MODELS = {
    "llama": Model(
        ScaleBlocks(128, 128),
        {
            "qkv": (6144, 4096),
            "out": (4096, 4096),
            "gate_up": (28672, 4096),
            "down": (4096, 14336),
        },
        (1, 8, 32, 128, 2048, 8192),
        1.31e9,
    ),
    "v41": Model(
        ScaleBlocks(32, 32, power_of_two=True),
        {
            "qkv_down": (1792, 5120),
            "q_up": (32768, 1280),
            "out": (5120, 8192),
            "gate_up": (4608, 5120),
            "down": (5120, 2304),
            "index_q": (4096, 1280),
        },
        (1, 4, 16, 64, 8192),
        0.79e9,
    ),
}


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


class Work:
    """Copies of a matrix, rows, and room for their products."""

    def __init__(self, model: Model, name: str, rows: int, most_copies: int | None = None) -> None:
        self.model, self.name, self.rows = model, name, rows
        self.features, self.columns = model.matrices[name]
        copies = max(2, CACHE_BYTES // (self.features * self.columns) + 1)
        group = group_of(model.blocks, self.columns)
        assert group is not None
        self.group = group
        generator = torch.Generator(DEVICE).manual_seed(0)
        with torch.device(DEVICE):
            self.weights = [
                scaled_numbers((self.features, self.columns), model.blocks, generator)
                for _ in range(min(copies, most_copies or copies))
            ]
            self.x = torch.randn((rows, self.columns), generator=generator).bfloat16()
            self.out = torch.empty((rows, self.features), dtype=torch.bfloat16)

    @property
    def words(self) -> bool:
        """Whether the kernel for powers of two multiplies the matrix."""
        return triton_words.takes(self.columns, self.model.blocks, self.group)

    def of_all(self, call: Callable[[Tensor, Tensor], object]) -> float:
        """Microseconds of a call with codes and scales, over all copies."""
        return median_us([partial(call, *each) for each in self.weights])

    def product(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The op."""
        return triton_scaled_linear(self.x, codes, scales, self.model.blocks, torch.bfloat16)

    def gap(self) -> float:
        """How far the op's first rows are from the definition."""
        weight = self.weights[0]
        expected = scaled_linear(self.x[:64], *weight, self.model.blocks, torch.bfloat16)
        return difference([self.product(*weight)[:64]], [expected])

    def floor_us(self) -> float:
        """The time to read the codes, or to multiply."""
        numbers = self.features * self.columns
        return max(numbers / BYTES_PER_US, 2 * self.rows * numbers / self.model.flops_per_us)

    def launches(self) -> dict[str, float]:
        """Microseconds of what comes in front of products and behind them."""
        if not self.words or self.rows == 1:
            rounding = partial(
                triton_quantize_rows, self.x, self.group, self.model.blocks.power_of_two
            )
            return {"rounding": median_us([rounding] * 4)}
        times = {
            "rounding": median_us([partial(fake_fp8_in_order, self.x, self.group, A_WORD)] * 4)
        }
        splits = triton_words.tile_for(self.rows, self.features, self.columns).splits
        if splits > 1:
            parts = torch.zeros((splits, self.rows, self.features), device=DEVICE)
            times[f"sum of {splits}"] = median_us([partial(add_parts, parts, self.out)] * 4)
        return times

    def candidates(self) -> Iterator[tuple[object, Callable[[Tensor, Tensor], object]]]:
        """Tiles, and the product with each; all of them round the rows as well."""
        given = {"blocks": self.model.blocks, "group": self.group, "out": self.out}
        for tile in word_tiles(self.rows, self.features, self.columns) if self.words else ():
            yield tile, partial(multiply_words, self.x, **given, tile=tile)
        if self.words and self.rows > 1:
            return
        for tile in ONE if self.rows == 1 else FEW if self.rows <= FEW_ROWS else ():
            yield tile, partial(after_rounding, multiply_few, self.x, **given, tile=tile)
        for tile in MANY if self.rows > 16 else ():
            yield tile, partial(after_rounding, multiply_many, self.x, **given, tile=tile)

    def best_tiles(self) -> list[str]:
        """The best tiles as text, the best one last."""
        results = {tile: self.attempt(call) for tile, call in self.candidates()}
        ranked = sorted(results, key=results.__getitem__)[:SHOWN]
        return [f"{results[each]:.1f} {each}" for each in reversed(ranked)]

    def attempt(self, call: Callable[[Tensor, Tensor], object]) -> float:
        """The median, or infinity where a tile does not fit the device."""
        try:
            return self.of_all(call)
        except triton.runtime.errors.OutOfResources:
            return float("inf")


def after_rounding(
    multiply: Callable[..., None],
    x: Tensor,
    *weight: Tensor,
    blocks: ScaleBlocks,
    group: int,
    **given: object,
) -> None:
    """A product whose rows are rounded in a launch of their own."""
    rounded = triton_quantize_rows(x, group, blocks.power_of_two)
    multiply(*rounded, *weight, blocks=blocks, group=group, **given)


def word_tiles(rows: int, features: int, columns: int) -> list[WordsTile]:
    """Tiles of the kernel for powers of two, the chosen one first."""
    chosen = triton_words.tile_for(rows, features, columns)
    heights = [chosen.rows, 8] if rows <= 8 else [chosen.rows]
    if rows == 1:
        found = [replace(chosen, rows=high) for high in heights]
    elif rows > FEW_ROWS:
        found = [chosen, *MANY_WORDS]
    else:
        found = [chosen]
        for high, (wide, inputs, warps, stages) in product(heights, FEW_WORDS):
            splits = min(max(chosen.splits * wide // 64, 1), -(-columns // inputs))
            found.append(WordsTile(high, wide, inputs, warps, stages, splits))
        found += [replace(chosen, splits=each) for each in (1, chosen.splits // 2) if each]
    return list(dict.fromkeys(found))


def measure(work: Work, *, tune: bool) -> None:
    """Print a line, and the best tiles."""
    times = {"ours": work.of_all(work.product)}
    if library.takes(work.rows, work.columns, work.model.blocks, torch.bfloat16) and library.agrees(
        work.x.device
    ):
        times["torch"] = work.of_all(partial(library_product, work.x))
    plain = [codes.bfloat16() for codes, _ in work.weights[: max(2, len(work.weights) // 2)]]
    times["bf16"] = median_us([partial(functional.linear, work.x, each) for each in plain])
    rate = ""
    if work.rows >= MANY_ROWS:
        flops = 2 * work.rows * work.features * work.columns
        rate = f" = {flops / times['ours'] / 1e6:.0f} TFLOP/s"
    shown = ", ".join(f"{key} {time:.1f}" for key, time in (times | work.launches()).items())
    print(
        f"{work.name:8} {work.rows:5} rows: floor {work.floor_us():.1f}, {shown} us; gap {work.gap():.4f}{rate}",
        flush=True,
    )
    if tune:
        print("   " + "\n   ".join(work.best_tiles()), flush=True)


def compile_tiles(model: str, name: str, rows: int) -> None:
    """Run every candidate once, so that Triton's cache on the disk holds it."""
    work = Work(MODELS[model], name, rows, 1)
    work.product(*work.weights[0])
    for _, call in work.candidates():
        try:
            call(*work.weights[0])
        except triton.runtime.errors.OutOfResources:
            continue
    torch.cuda.synchronize()


def compile_ahead(model: str, names: list[str], every_rows: list[int]) -> None:
    """Compile the candidates of all matrices in processes beside each other; many rows, whose tiles take longest, first."""
    jobs = [(model, name, rows) for rows in sorted(every_rows, reverse=True) for name in names]
    spawn = multiprocessing.get_context("spawn")
    workers = min(COMPILERS, os.cpu_count() or 1, len(jobs))
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        for done in [pool.submit(compile_tiles, *job) for job in jobs]:
            done.result()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Products with 8-bit weights.")
    parser.add_argument("--model", choices=[*MODELS], default="llama")
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--matrices", nargs="+")
    parser.add_argument("--tune", action="store_true")
    given = parser.parse_args()
    model = MODELS[given.model]
    names, every_rows = given.matrices or [*model.matrices], given.rows or [*model.rows]
    if given.tune:
        compile_ahead(given.model, names, every_rows)
    for name in names:
        for rows in every_rows:
            measure(Work(model, name, rows), tune=given.tune)


if __name__ == "__main__":
    main()
