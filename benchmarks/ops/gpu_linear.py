"""How near memory speed do products of few rows run on a GPU, with which tiles, and from how many rows does cuBLAS win?

    PYTHONPATH=. python benchmarks/ops/gpu_linear.py [--models qwen3-0.6b llama-3-8b] [--workers 12] [--quick]

Every matrix of a model is multiplied in one CUDA graph over as many weights as the model has layers, so that
they come from memory. First every tile is timed for each matrix and row class, launched in order and (on
Hopper) overlapped; then whole models are replayed as the chain of a decode step without attention. Times are
medians of replays; the floor is bytes of weights at 4.15 TB/s. Lines for `ops/linear/tile.py` come last.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.ops.activation.triton import triton_silu_mul
from tokamak.ops.linear.few_rows import product
from tokamak.ops.linear.tile import Tile, row_class, tile_for
from tokamak.ops.linear.triton import IN_ORDER, multiply
from tokamak.ops.linear.triton_sm90 import OVERLAPPED
from tokamak.ops.norm.triton import triton_add_rms_norm, triton_rms_norm

BYTES_PER_S = 4.15e12
SHARED_BYTES = 200 * 1024
EPS = 1e-6
LAUNCHES: dict[str, Mapping[str, object]] = {"order": IN_ORDER, "overlap": OVERLAPPED}
CLASSES = (1, 8, 16)
ROWS = (1, 2, 4, 8, 16, 32)
ONE_ROW = [
    (1, 1024, 4), (2, 1024, 4), (4, 1024, 4), (8, 1024, 4), (2, 2048, 4), (1, 4096, 4), (2, 4096, 4), (4, 2048, 8),
    (2, 512, 2), (4, 512, 2), (2, 256, 1), (4, 256, 1), (1, 1024, 1), (2, 1024, 2),
]  # fmt: skip
SEVERAL_ROWS = [
    (16, 64, 4, 4), (16, 64, 8, 3), (16, 128, 4, 3), (16, 128, 8, 2), (16, 32, 8, 6), (16, 64, 4, 6),
    (32, 64, 4, 4), (32, 64, 8, 3), (32, 128, 4, 3), (32, 32, 4, 6), (64, 64, 4, 3), (64, 32, 8, 4),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Matrix:
    """One product of a layer, or the head."""

    name: str
    features: int
    columns: int
    norm: bool = False
    gated: bool = False
    into: bool = False
    head: bool = False

    @property
    def bytes(self) -> int:
        return self.features * self.columns * 2

    def tiles(self, rows: int) -> list[Tile]:
        """Tiles worth timing; those that need too much shared memory, or hang over the columns, are left out."""
        if rows == 1:
            return [Tile(*each) for each in ONE_ROW if each[1] <= self.columns]
        weights = 2 if self.gated else 1
        found = []
        for features, columns, warps, stages in SEVERAL_ROWS:
            stage = warps * columns * 2 * (features * weights + rows + 1)
            if stage * stages <= SHARED_BYTES and warps * columns <= self.columns:
                found.append(Tile(features, columns, warps, stages))
        return found


def matrices(width: int, query: int, kv: int, inner: int, vocab: int) -> list[Matrix]:
    return [
        Matrix("qkv", query + 2 * kv, width, norm=True),
        Matrix("o", width, query, into=True),
        Matrix("gate_up", 2 * inner, width, norm=True, gated=True),
        Matrix("down", width, inner, into=True),
        Matrix("head", vocab, width, norm=True, head=True),
    ]


MODELS = {
    "qwen3-0.6b": (28, matrices(1024, 2048, 1024, 3072, 151936)),
    "llama-3-8b": (32, matrices(4096, 4096, 1024, 14336, 128256)),
}


@dataclass(slots=True)
class Place:
    """Tensors that products of a matrix read and write."""

    weights: list[Tensor]
    x: Tensor
    nothing: Tensor
    norm: Tensor
    out: Tensor


def place_of(matrix: Matrix, copies: int, rows: int, features: int | None = None) -> Place:
    features = features or matrix.features
    kept = features // 2 if matrix.gated else features
    kind = torch.float32 if matrix.head else torch.bfloat16
    scale = matrix.columns**-0.5
    numbers = {"device": "cuda", "dtype": torch.bfloat16}
    return Place(
        [torch.randn((features, matrix.columns), **numbers) * scale for _ in range(copies)],
        torch.randn((rows, matrix.columns), **numbers),
        torch.zeros((rows, matrix.columns), **numbers),
        torch.ones(matrix.columns, **numbers),
        torch.zeros((rows, kept), device="cuda", dtype=kind),
    )


def fused(matrix: Matrix, place: Place, weight: Tensor, tile: Tile | None, launch: str) -> None:
    multiply(
        place.x, weight, place.out,
        norm_weight=place.norm if matrix.norm else None, eps=EPS, gated=matrix.gated, into=matrix.into,
        tile=tile, launch=LAUNCHES[launch],
    )  # fmt: skip


def library(matrix: Matrix, place: Place, weight: Tensor) -> None:
    """PyTorch's product alone."""
    if matrix.head:
        product(place.x, weight, torch.float32)
    else:
        functional.linear(place.x, weight)


def unfused(matrix: Matrix, place: Place, weight: Tensor) -> None:
    """PyTorch's product with the norm and the activation of their own kernels."""
    x = place.x
    if matrix.norm and not matrix.head:
        x = triton_add_rms_norm(place.nothing, x, place.norm, EPS)
    elif matrix.norm:
        x = triton_rms_norm(x, place.norm, EPS)
    y = product(x, weight, torch.float32) if matrix.head else functional.linear(x, weight)
    if matrix.gated:
        triton_silu_mul(y)


def replay_us(record: Callable[[], None]) -> float:
    """Microseconds of a replay: the median of some."""
    record()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        record()
    graph.replay()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def each_us(matrix: Matrix, place: Place, call: Callable[[Matrix, Place, Tensor], None]) -> float:
    """Microseconds of one product."""

    def record() -> None:
        for weight in place.weights:
            call(matrix, place, weight)

    return replay_us(record) / len(place.weights)


def jobs(models: list[str], classes: tuple[int, ...]) -> Iterator[tuple[Matrix, int, Tile, str]]:
    for model in models:
        for matrix in MODELS[model][1]:
            for rows in classes:
                for tile in {
                    *matrix.tiles(rows),
                    tile_for(rows, matrix.features, matrix.columns, gated=matrix.gated),
                }:
                    for launch in LAUNCHES:
                        yield matrix, rows, tile, launch


def compile_some(work: list[tuple[Matrix, int, Tile, str]]) -> list[str]:
    """Compile kernels into Triton's cache, over a short weight of the same columns; returns what failed."""
    failed = []
    for matrix, rows, tile, launch in work:
        features = 256 if matrix.features % 256 == 0 else 128
        place = place_of(matrix, 1, rows, features)
        try:
            fused(matrix, place, place.weights[0], tile, launch)
        except Exception as error:
            failed.append(
                f"{matrix.name} {rows} {tile} {launch}: {type(error).__name__} {str(error)[:120]}"
            )
    return failed


def compile_all(work: list[tuple[Matrix, int, Tile, str]], workers: int) -> None:
    begun = time.perf_counter()
    parts = [work[at::workers] for at in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        failed = [line for lines in pool.map(compile_some, parts, chunksize=1) for line in lines]
    print(f"compiled {len(work)} kernels in {time.perf_counter() - begun:.0f} s", flush=True)
    for line in failed[:10]:
        print("  failed:", line)


def gap(matrix: Matrix, place: Place, tile: Tile, launch: str) -> float:
    """The largest difference from PyTorch's float32 product, relative to the larger of 1 and that."""
    weight, x = place.weights[0].float(), place.x.float()
    if matrix.norm:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    y = x @ weight.T
    if matrix.gated:
        gate, up = y.chunk(2, dim=-1)
        y = functional.silu(gate) * up
    place.out.zero_()
    fused(matrix, place, place.weights[0], tile, launch)
    return ((place.out.float() - y).abs() / y.abs().clamp(min=1)).max().item()


def sweep(model: str, classes: tuple[int, ...]) -> dict[tuple[int, str, str], Tile]:
    """Time every tile; returns the fastest by row class, matrix and launch."""
    copies, parts = MODELS[model]
    best: dict[tuple[int, str, str], Tile] = {}
    for matrix in parts:
        weights = place_of(matrix, 1 if matrix.head else copies, 1).weights
        floor = matrix.bytes / BYTES_PER_S * 1e6
        for rows in classes:
            place = place_of(matrix, 0, rows)
            place.weights = weights
            line = [f"{model} {matrix.name:8}{rows:3} rows floor {floor:7.2f}"]
            rule = tile_for(rows, matrix.features, matrix.columns, gated=matrix.gated)
            for launch in LAUNCHES:
                times: dict[Tile, float] = {}
                for tile in dict.fromkeys([rule, *matrix.tiles(rows)]):
                    try:
                        call = partial(fused, tile=tile, launch=launch)
                        times[tile] = each_us(matrix, place, call)
                    except Exception as error:
                        print(f"  failed: {matrix.name} {rows} {tile} {launch}: {str(error)[:160]}")
                if not times:
                    continue
                order = sorted(times, key=times.__getitem__)
                best[rows, matrix.name, launch] = order[0]
                worst = gap(matrix, place, order[0], launch)
                shown = " ".join(
                    f"{tile.features}/{tile.columns}/{tile.warps}/{tile.stages}={times[tile]:.2f}"
                    for tile in order[:5]
                )
                speed = matrix.bytes / times[order[0]] / 1e3
                line.append(
                    f"\n    {launch:8} {shown} | {speed:5.0f} GB/s, rule {times.get(rule, float('nan')):.2f}, gap {worst:.4f}"
                )
            alone = each_us(matrix, place, library)
            whole = each_us(matrix, place, unfused)
            print(
                "".join(line) + f"\n    cuBLAS {alone:.2f}, with its neighbours {whole:.2f}",
                flush=True,
            )
        del weights
        torch.cuda.empty_cache()
    return best


def chain_us(model: str, rows: int, best: dict[tuple[int, str, str], Tile], way: str) -> float:
    """Microseconds of all products of a decode step, in their order."""
    copies, parts = MODELS[model]
    places = {m.name: place_of(m, 0, rows) for m in parts}
    weights = CHAIN_WEIGHTS[model]

    def call(matrix: Matrix, layer: int) -> None:
        weight, place = weights[matrix.name][layer], places[matrix.name]
        if way == "unfused":
            unfused(matrix, place, weight)
        elif way == "cublas":
            library(matrix, place, weight)
        elif way.startswith("rule"):
            fused(matrix, place, weight, None, way.split()[1])
        else:
            fused(matrix, place, weight, best[row_class(rows), matrix.name, way], way)

    def record() -> None:
        for layer in range(copies):
            for matrix in parts[:-1]:
                call(matrix, layer)
        call(parts[-1], 0)

    return replay_us(record)


CHAIN_WEIGHTS: dict[str, dict[str, list[Tensor]]] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="time the checked-in tiles only")
    options = parser.parse_args()
    classes = () if options.quick else CLASSES
    ways = ("rule order", "rule overlap", "order", "overlap", "unfused", "cublas")
    if options.quick:
        ways = tuple(way for way in ways if way not in LAUNCHES)
    else:
        compile_all(list(jobs(options.models, classes)), options.workers)
    table, lines = [], []
    for model in options.models:
        copies, parts = MODELS[model]
        best = sweep(model, classes)
        CHAIN_WEIGHTS[model] = {
            m.name: place_of(m, 1 if m.head else copies, 1).weights for m in parts
        }
        floor = sum(m.bytes * (1 if m.head else copies) for m in parts) / BYTES_PER_S * 1e3
        for rows in ROWS:
            few = [way for way in ways if rows <= 16 or way in ("unfused", "cublas")]
            times = {way: chain_us(model, rows, best, way) / 1e3 for way in few}
            shown = ", ".join(f"{way} {ms:.3f}" for way, ms in times.items())
            table.append(f"{model} {rows:3} rows: floor {floor:.3f} ms, {shown}")
        for launch in LAUNCHES:
            lines.append(f"# {model}, {launch}")
            for (rows, name, kind), tile in best.items():
                matrix = next(m for m in parts if m.name == name)
                if kind == launch:
                    lines.append(
                        f"    ({rows}, {matrix.features}, {matrix.columns}, {matrix.gated}): "
                        f"Tile({tile.features}, {tile.columns}, {tile.warps}, {tile.stages}),"
                    )
        del CHAIN_WEIGHTS[model]
        torch.cuda.empty_cache()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print("\n".join(lines))
    print("\n".join(table))


if __name__ == "__main__":
    main()
