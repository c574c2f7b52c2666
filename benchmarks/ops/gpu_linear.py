"""How near memory speed do products of few rows run on a GPU, with which tiles, and from how many rows does cuBLAS win?

    PYTHONPATH=. python benchmarks/ops/gpu_linear.py [--models qwen3-0.6b llama-3-8b qwen3-30b-a3b]
        [--classes 1 2 4 8 16] [--workers 12] [--quick]

Every matrix of a model is multiplied in one CUDA graph over as many weights as the model has layers, so that
they come from memory. First every tile is timed for each matrix and row class, of each kind (vector
arithmetic, tensor cores, tensor cores out of registers) and both launched in order and overlapped; then whole
models are replayed as the chain of a decode step without attention. Times are medians of replays; the floor is
bytes of weights at 4.15 TB/s. Lines for `ops/linear/tile.py` and the table of chains come last.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.ops.activation.triton import triton_silu_mul
from tokamak.ops.linear.few_rows import product
from tokamak.ops.linear.tile import CLASSES, Tile, fused_rows, row_class, tile_for
from tokamak.ops.linear.triton_few import multiply
from tokamak.ops.linear.triton_sm90 import OVERLAPPED
from tokamak.ops.linear.triton_sm90_registers import multiply_in_registers
from tokamak.ops.norm.triton import triton_add_rms_norm, triton_rms_norm

BYTES_PER_S = 4.15e12
SHARED_BYTES = 200 * 1024
EPS = 1e-6
MOST_UNROLLED = 16
"""Tiles of a program's columns: more of them take long to compile."""
KINDS = ("lanes", "cores", "registers")
ROWS = (1, 2, 4, 8, 16, 32)
ONE_ROW = [
    (1, 1024, 4), (2, 1024, 4), (4, 1024, 4), (8, 1024, 4), (2, 2048, 4), (1, 4096, 4), (2, 4096, 4), (4, 2048, 8),
    (2, 512, 2), (4, 512, 2), (2, 256, 1), (4, 256, 1), (1, 1024, 1), (2, 1024, 2),
]  # fmt: skip
LANES = [
    (1, 1024, 4), (2, 1024, 4), (4, 1024, 4), (2, 2048, 8), (4, 2048, 8), (2, 512, 2), (4, 512, 2), (4, 256, 1),
]  # fmt: skip
CORES = [
    (16, 64, 4, 4), (16, 64, 8, 3), (16, 128, 4, 3), (16, 128, 8, 2), (16, 32, 8, 6), (16, 64, 4, 6),
    (32, 64, 4, 4), (32, 64, 8, 3), (32, 128, 4, 3), (32, 32, 4, 6), (64, 64, 4, 3), (64, 32, 8, 4),
    (64, 64, 4, 4), (128, 64, 4, 2), (128, 32, 4, 4), (16, 256, 4, 2),
]  # fmt: skip
REGISTERS = [
    (16, 64, 1), (16, 256, 1), (16, 64, 2), (16, 128, 2), (16, 256, 2), (16, 64, 4), (16, 128, 4), (16, 256, 4),
    (16, 64, 8), (16, 128, 8), (16, 256, 8), (16, 64, 16), (16, 128, 16), (32, 64, 1), (32, 128, 2), (32, 64, 4),
    (32, 128, 4), (32, 64, 8), (64, 64, 2), (64, 64, 4),
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
        return [
            replace(tile, overlaps=overlaps)
            for tile in self._tiles(rows)
            for overlaps in (False, True)
        ]

    def _tiles(self, rows: int) -> Iterator[Tile]:
        features = self.features // 2 if self.gated else self.features
        for each in ONE_ROW if rows == 1 else LANES if rows <= 8 else []:
            if each[1] <= self.columns <= each[1] * MOST_UNROLLED:
                yield Tile(*each)
        if rows == 1:
            return
        weights = 2 if self.gated else 1
        for each in CORES:
            tile = Tile(*each)
            stage = tile.warps * tile.columns * 2 * (tile.features * weights + rows + 1)
            if stage * tile.stages <= SHARED_BYTES and tile.warps * tile.columns <= self.columns:
                yield tile
        for each in REGISTERS:
            tile = Tile(*each, registers=True)
            most = tile.warps * tile.columns * MOST_UNROLLED
            if tile.divides(features, self.columns) and self.columns <= most:
                yield tile


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
    "qwen3-30b-a3b": (
        48,
        [
            Matrix("qkv", 5120, 2048, norm=True),
            Matrix("o", 2048, 4096, into=True),
            Matrix("router", 128, 2048),
            Matrix("head", 151936, 2048, norm=True, head=True),
        ],
    ),
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


def kind_of(tile: Tile) -> str:
    return "registers" if tile.registers else "cores" if tile.stages else "lanes"


def rule(matrix: Matrix, rows: int) -> Tile:
    """The tile that is checked in."""
    return tile_for(rows, matrix.features, matrix.columns, gated=matrix.gated, registers=True)


def fused(matrix: Matrix, place: Place, weight: Tensor, tile: Tile | None) -> None:
    multiply(
        place.x, weight, place.out,
        norm_weight=place.norm if matrix.norm else None, eps=EPS, gated=matrix.gated, into=matrix.into,
        tile=tile, overlapped=OVERLAPPED, in_registers=multiply_in_registers,
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


def jobs(models: list[str], classes: list[int]) -> Iterator[tuple[Matrix, int, Tile]]:
    for model in models:
        for matrix in MODELS[model][1]:
            for rows in classes:
                for tile in {*matrix.tiles(rows), rule(matrix, rows)}:
                    yield matrix, rows, tile


def compile_some(work: list[tuple[Matrix, int, Tile]]) -> list[str]:
    """Compile kernels into Triton's cache, over a short weight of the same columns; returns what failed."""
    failed = []
    for matrix, rows, tile in work:
        features = 256 if matrix.features % 256 == 0 else 128
        place = place_of(matrix, 1, rows, features)
        try:
            fused(matrix, place, place.weights[0], tile)
        except Exception as error:
            failed.append(f"{matrix.name} {rows} {tile}: {type(error).__name__} {str(error)[:120]}")
    return failed


def compile_all(work: list[tuple[Matrix, int, Tile]], workers: int) -> None:
    begun = time.perf_counter()
    parts = [work[at::workers] for at in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        failed = [line for lines in pool.map(compile_some, parts, chunksize=1) for line in lines]
    print(f"compiled {len(work)} kernels in {time.perf_counter() - begun:.0f} s", flush=True)
    for line in failed[:10]:
        print("  failed:", line)


def gap(matrix: Matrix, place: Place, tile: Tile) -> float:
    """The largest difference from PyTorch's float32 product, relative to the larger of 1 and that."""
    weight, x = place.weights[0].float(), place.x.float()
    if matrix.norm:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    y = x @ weight.T
    if matrix.gated:
        gate, up = y.chunk(2, dim=-1)
        y = functional.silu(gate) * up
    place.out.zero_()
    fused(matrix, place, place.weights[0], tile)
    return ((place.out.float() - y).abs() / y.abs().clamp(min=1)).max().item()


def sweep(model: str, classes: list[int]) -> dict[tuple[int, str], dict[Tile, float]]:
    """Time every tile; returns the times by row class and matrix."""
    copies, parts = MODELS[model]
    found: dict[tuple[int, str], dict[Tile, float]] = {}
    for matrix in parts:
        weights = place_of(matrix, 1 if matrix.head else copies, 1).weights
        floor = matrix.bytes / BYTES_PER_S * 1e6
        for rows in classes:
            place = place_of(matrix, 0, rows)
            place.weights = weights
            times: dict[Tile, float] = {}
            for tile in dict.fromkeys([rule(matrix, rows), *matrix.tiles(rows)]):
                try:
                    times[tile] = each_us(matrix, place, partial(fused, tile=tile))
                except Exception as error:
                    print(f"  failed: {matrix.name} {rows} {tile}: {str(error)[:160]}")
            found[rows, matrix.name] = times
            checked_in = times.get(rule(matrix, rows), float("nan"))
            print(f"{model} {matrix.name} {rows} rows: floor {floor:.2f}, rule {checked_in:.2f}")
            for kind in KINDS:
                for overlaps in (False, True):
                    same = [
                        tile
                        for tile in times
                        if kind_of(tile) == kind and tile.overlaps == overlaps
                    ]
                    order = sorted(same, key=times.__getitem__)
                    if order:
                        shown = " ".join(
                            f"{tile.features}/{tile.columns}/{tile.warps}/{tile.stages}={times[tile]:.2f}"
                            for tile in order[:4]
                        )
                        worst = gap(matrix, place, order[0])
                        name = f"{kind} {'overlap' if overlaps else 'order'}"
                        print(f"    {name:18} {shown}, gap {worst:.4f}")
            alone = each_us(matrix, place, library)
            whole = each_us(matrix, place, unfused)
            print(f"    cuBLAS {alone:.2f}, with its neighbours {whole:.2f}", flush=True)
            LIBRARY[model, rows, matrix.name] = whole
        del weights
        torch.cuda.empty_cache()
    return found


LIBRARY: dict[tuple[str, int, str], float] = {}
"""Microseconds of the library's product and its neighbours by model, row class and matrix."""


def fastest(times: dict[Tile, float], way: str) -> Tile | None:
    """The fastest tile of a way: a kind, a launch, both, or `any`."""
    fitting = [
        tile
        for tile in times
        if way == "any"
        or set(way.split()) <= {kind_of(tile), "overlap" if tile.overlaps else "order"}
    ]
    return min(fitting, key=times.__getitem__, default=None)


def chain_us(
    model: str, rows: int, found: dict[tuple[int, str], dict[Tile, float]], way: str
) -> float:
    """Microseconds of all products of a decode step, in their order."""
    copies, parts = MODELS[model]
    places = {m.name: place_of(m, 0, rows) for m in parts}
    weights = CHAIN_WEIGHTS[model]
    calls: dict[str, Callable[[Matrix, Place, Tensor], None]] = {}
    for matrix in parts:
        most = fused_rows(matrix.features, matrix.columns, gated=matrix.gated)
        times = found.get((row_class(rows), matrix.name), {}) if rows <= 16 else {}
        tile = fastest(times, "any" if way == "best" else way)
        if way == "cublas":
            calls[matrix.name] = library
        elif way == "checked in" and rows <= most:
            calls[matrix.name] = partial(fused, tile=None)
        elif tile is None or (
            way == "best" and times[tile] > LIBRARY[model, row_class(rows), matrix.name]
        ):
            calls[matrix.name] = unfused
        else:
            calls[matrix.name] = partial(fused, tile=tile)

    def record() -> None:
        for layer in range(copies):
            for matrix in parts[:-1]:
                calls[matrix.name](matrix, places[matrix.name], weights[matrix.name][layer])
        head = parts[-1]
        calls[head.name](head, places[head.name], weights[head.name][0])

    return replay_us(record)


CHAIN_WEIGHTS: dict[str, dict[str, list[Tensor]]] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--classes", nargs="+", type=int, choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="time the checked-in tiles only")
    options = parser.parse_args()
    classes = [] if options.quick else options.classes
    ways = ["checked in", "unfused", "cublas"]
    if classes:
        kinds = [f"{kind} {launch}" for kind in KINDS for launch in ("order", "overlap")]
        ways += ["best", "any", *kinds]
        compile_all(list(jobs(options.models, classes)), options.workers)
    table, lines = [], []
    for model in options.models:
        copies, parts = MODELS[model]
        found = sweep(model, classes)
        CHAIN_WEIGHTS[model] = {
            m.name: place_of(m, 1 if m.head else copies, 1).weights for m in parts
        }
        floor = sum(m.bytes * (1 if m.head else copies) for m in parts) / BYTES_PER_S * 1e3
        for rows in ROWS:
            swept = rows <= 16 and row_class(rows) in classes
            few = [way for way in ways if swept or way in ("checked in", "unfused", "cublas")]
            times = {way: chain_us(model, rows, found, way) / 1e3 for way in few}
            shown = ", ".join(f"{way} {ms:.3f}" for way, ms in times.items())
            table.append(f"{model} {rows:3} rows: floor {floor:.3f} ms, {shown}")
        lines.append(f"# {model}")
        for (rows, name), times in found.items():
            matrix = next(m for m in parts if m.name == name)
            tile = fastest(times, "any")
            if tile is not None:
                library_us = LIBRARY[model, rows, name]
                wins = "" if times[tile] <= library_us else f"  # library {library_us:.2f}"
                shape = f"{rows}, {matrix.features}, {matrix.columns}, {matrix.gated}"
                lines.append(f"    ({shape}): {tile},  # {times[tile]:.2f}{wins}")
        del CHAIN_WEIGHTS[model]
        torch.cuda.empty_cache()
    print("\n".join(lines))
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print("\n".join(table))


if __name__ == "__main__":
    main()
