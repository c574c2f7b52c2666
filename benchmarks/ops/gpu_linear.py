"""How near memory speed do products of few rows run on a GPU, with which tiles, and from how many rows does cuBLAS win?

    PYTHONPATH=. python benchmarks/ops/gpu_linear.py [--models qwen3-0.6b llama-3-8b qwen3-30b-a3b]
        [--classes 1 2 4 8 16 32] [--workers 12] [--quick]

Every matrix of a model is multiplied in one CUDA graph over as many weights as the model has layers, so that
they come from memory. First every tile is timed for each matrix and row class, of each kind (vector
arithmetic, tensor cores, tensor cores out of registers), both launched in order and overlapped, and from 16
rows also with the norm in a kernel of its own ("apart"). Then whole models are replayed as the chain of a decode
step without attention and experts: with the forms of each way, and with those that a search finds, which changes
one matrix at a time and keeps what makes the chain faster. Every chain is timed twice, the second time with all
kernels asking for the largest shared memory, so that no multiprocessor has to change its division between two of
them. Times are medians of replays; the floor is bytes of weights at 4.15 TB/s. Lines for `ops/linear/tile.py` and
the table of chains come last.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from triton import knobs

from tokamak.ops.activation.triton_gated import TritonActivations
from tokamak.ops.linear.few_rows import product
from tokamak.ops.linear.tile import CLASSES, Tile, fused_rows, normed_rows, row_class, tile_for
from tokamak.ops.linear.triton_few import multiply
from tokamak.ops.linear.triton_sm90 import OVERLAPPED
from tokamak.ops.linear.triton_sm90_registers import multiply_in_registers
from tokamak.ops.norm.triton_norms import TritonNorms
from tokamak.ops.triton_order import IN_ORDER
from tokamak.ops.triton_overlap import OVERLAPPED as NEIGHBOURS_OVERLAPPED

BYTES_PER_S = 4.15e12
SHARED_BYTES = 200 * 1024
EPS = 1e-6
MOST_UNROLLED = 16
"""Tiles of a program's columns: more of them take long to compile."""
MOST_IN_REGISTERS = 4096
"""Numbers of rows that a warp of tensor cores out of registers holds at a time."""
APART_FROM = 16
"""Rows from which norms in kernels of their own are worth timing: a program norms all rows."""
KINDS = ("lanes", "cores", "registers")
ROWS = (1, 2, 4, 8, 16, 32, 64)
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
NORMS = {"order": TritonNorms(IN_ORDER), "overlap": TritonNorms(NEIGHBOURS_OVERLAPPED)}
ACTIVATIONS = {
    "order": TritonActivations(IN_ORDER),
    "overlap": TritonActivations(NEIGHBOURS_OVERLAPPED),
}


@dataclass(frozen=True, slots=True)
class Form:
    """A kernel for few rows, and whether the norm has a kernel of its own in front of it."""

    tile: Tile
    apart: bool = False

    @property
    def kind(self) -> str:
        return "registers" if self.tile.registers else "cores" if self.tile.stages else "lanes"

    @property
    def way(self) -> str:
        launch = "overlap" if self.tile.overlaps else "order"
        return f"{self.kind} {launch}{' apart' if self.apart else ''}"


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
    behind_sum: bool = False
    """Whether what comes before it leaves a sum, or other products share its norm: then that is always apart."""

    @property
    def bytes(self) -> int:
        return self.features * self.columns * 2

    def forms(self, rows: int) -> list[Form]:
        """Forms worth timing; those that need too much shared memory, or hang over the columns, are left out."""
        aparts = (
            [True]
            if self.behind_sum
            else [False, True]
            if self.norm and rows >= APART_FROM
            else [False]
        )
        return [
            Form(replace(tile, overlaps=overlaps), apart)
            for tile in self._tiles(rows)
            for overlaps in (False, True)
            for apart in aparts
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
            fits = tile.columns * max(rows, 8) <= MOST_IN_REGISTERS
            if fits and tile.divides(features, self.columns) and self.columns <= most:
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
            Matrix("qkv", 5120, 2048, norm=True, behind_sum=True),
            Matrix("o", 2048, 4096, into=True),
            Matrix("router", 128, 2048, norm=True, behind_sum=True),
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


def rule(matrix: Matrix, rows: int) -> Form:
    """The form that is checked in."""
    shape = matrix.features, matrix.columns
    tile = tile_for(rows, *shape, gated=matrix.gated, registers=True)
    apart = matrix.norm and rows > normed_rows(*shape, gated=matrix.gated)
    return Form(tile, apart or matrix.behind_sum)


def fused(
    matrix: Matrix, place: Place, weight: Tensor, form: Form, pending: Tensor | None = None
) -> None:
    """The kernel for few rows, and a norm of its own where one is due."""
    x, norm = place.x, place.norm if matrix.norm else None
    if norm is not None and (form.apart or pending is not None):
        x, norm = normed(place, pending, "overlap"), None
    multiply(
        x, weight, place.out,
        norm_weight=norm, eps=EPS, gated=matrix.gated, into=matrix.into,
        tile=form.tile, overlapped=OVERLAPPED, in_registers=multiply_in_registers,
    )  # fmt: skip


def normed(place: Place, pending: Tensor | None, launch: str) -> Tensor:
    """Rows behind a norm of their own kernel, which also adds what is pending."""
    if pending is None:
        return NORMS[launch].rms_norm(place.x, place.norm, EPS)
    return NORMS[launch].add_rms_norm(pending, place.x, place.norm, EPS)


def library(matrix: Matrix, place: Place, weight: Tensor, pending: Tensor | None = None) -> None:
    """PyTorch's product alone."""
    if matrix.head:
        product(place.x, weight, torch.float32)
    else:
        functional.linear(place.x, weight)


def unfused(
    matrix: Matrix,
    place: Place,
    weight: Tensor,
    pending: Tensor | None = None,
    launch: str = "overlap",
) -> None:
    """PyTorch's product with the norm and the activation of their own kernels."""
    x = place.x
    if matrix.norm:
        x = normed(place, pending, launch)
    y = product(x, weight, torch.float32) if matrix.head else functional.linear(x, weight)
    if matrix.gated:
        ACTIVATIONS[launch].silu_mul(y)


class Division:
    """How multiprocessors divide their memory between a cache and what kernels share, as Triton's kernels ask."""

    PREFERRED = 9
    """The driver's name of that attribute of a kernel."""

    def __init__(self) -> None:
        self.percent = -1
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._kernels: list[int] = []
        knobs.runtime.kernel_load_end_hook.add(self._loaded)

    def _loaded(self, *loaded: Any, **_: Any) -> None:
        kernel = loaded[1]
        self._kernels.append(kernel)
        self._ask(kernel)

    def _ask(self, kernel: int) -> None:
        failed = self._driver.cuFuncSetAttribute(
            ctypes.c_void_p(kernel), self.PREFERRED, self.percent
        )
        assert not failed, f"cuFuncSetAttribute returned {failed}"

    def set(self, percent: int) -> None:
        """Ask for a share of shared memory in percent, or -1 for what the driver thinks best."""
        self.percent = percent
        for kernel in self._kernels:
            self._ask(kernel)


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


def jobs(models: list[str], classes: list[int]) -> Iterator[tuple[Matrix, int, Form]]:
    for model in models:
        for matrix in MODELS[model][1]:
            for rows in classes:
                for form in dict.fromkeys([*matrix.forms(rows), rule(matrix, rows)]):
                    yield matrix, rows, form


def compile_some(work: list[tuple[Matrix, int, Form]]) -> list[str]:
    """Compile kernels into Triton's cache, over a short weight of the same columns; returns what failed."""
    failed = []
    for matrix, rows, form in work:
        features = 256 if matrix.features % 256 == 0 else 128
        place = place_of(matrix, 1, rows, features)
        try:
            fused(matrix, place, place.weights[0], form)
        except Exception as error:
            failed.append(f"{matrix.name} {rows} {form}: {type(error).__name__} {str(error)[:120]}")
    return failed


def compile_all(work: list[tuple[Matrix, int, Form]], workers: int) -> None:
    begun = time.perf_counter()
    parts = [work[at::workers] for at in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        failed = [line for lines in pool.map(compile_some, parts, chunksize=1) for line in lines]
    print(f"compiled {len(work)} kernels in {time.perf_counter() - begun:.0f} s", flush=True)
    for line in failed[:10]:
        print("  failed:", line)


def gap(matrix: Matrix, place: Place, form: Form) -> float:
    """The largest difference from PyTorch's float32 product, relative to the larger of 1 and that."""
    weight, x = place.weights[0].float(), place.x.float()
    if matrix.norm:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    y = x @ weight.T
    if matrix.gated:
        gate, up = y.chunk(2, dim=-1)
        y = functional.silu(gate) * up
    place.out.zero_()
    fused(matrix, place, place.weights[0], form)
    return ((place.out.float() - y).abs() / y.abs().clamp(min=1)).max().item()


Times = dict[tuple[int, str], dict[Form, float]]
"""Microseconds of forms by row class and matrix."""


def sweep(model: str, classes: list[int]) -> Times:
    """Time every form."""
    copies, parts = MODELS[model]
    found: Times = {}
    for matrix in parts:
        weights = place_of(matrix, 1 if matrix.head else copies, 1).weights
        floor = matrix.bytes / BYTES_PER_S * 1e6
        for rows in classes:
            place = place_of(matrix, 0, rows)
            place.weights = weights
            times: dict[Form, float] = {}
            for form in dict.fromkeys([rule(matrix, rows), *matrix.forms(rows)]):
                try:
                    times[form] = each_us(matrix, place, partial(fused, form=form))
                except Exception as error:
                    print(f"  failed: {matrix.name} {rows} {form}: {str(error)[:160]}")
            found[rows, matrix.name] = times
            checked_in = times.get(rule(matrix, rows), float("nan"))
            print(f"{model} {matrix.name} {rows} rows: floor {floor:.2f}, rule {checked_in:.2f}")
            for way in sorted({form.way for form in times}):
                order = sorted((f for f in times if f.way == way), key=times.__getitem__)
                shown = " ".join(
                    f"{form.tile.features}/{form.tile.columns}/{form.tile.warps}/{form.tile.stages}"
                    f"={times[form]:.2f}"
                    for form in order[:4]
                )
                worst = gap(matrix, place, order[0])
                print(f"    {way:24} {shown}, gap {worst:.4f}")
            alone, whole, slow = (
                each_us(matrix, place, call)
                for call in (library, unfused, partial(unfused, launch="order"))
            )
            print(
                f"    cuBLAS {alone:.2f}, with its neighbours {whole:.2f}, those in order {slow:.2f}",
                flush=True,
            )
        del weights
        torch.cuda.empty_cache()
    return found


def fastest(times: dict[Form, float], way: str) -> Form | None:
    """The fastest form of a way: a kind, a launch, both, or `any`."""
    fitting = [form for form in times if way == "any" or set(way.split()) <= set(form.way.split())]
    return min(fitting, key=times.__getitem__, default=None)


class Chain:
    """All products of a decode step of a model, in their order, and their neighbours."""

    def __init__(self, model: str, rows: int, times: Times) -> None:
        self.model, self.rows, self.times = model, rows, times
        self._copies, self.parts = MODELS[model]
        self._places = {m.name: place_of(m, 0, rows) for m in self.parts}
        width = self.parts[0].columns
        self._sum = torch.zeros((rows, width), device="cuda", dtype=torch.bfloat16)

    def swept(self, matrix: Matrix) -> dict[Form, float]:
        return self.times.get((row_class(self.rows), matrix.name), {}) if self.rows <= 32 else {}

    def forms(self, way: str) -> dict[str, Form | None]:
        """The form of every matrix by name, None for the library's product."""
        if way != "checked in":
            return {m.name: fastest(self.swept(m), way) for m in self.parts}
        return {
            m.name: rule(m, self.rows)
            if self.rows <= fused_rows(m.features, m.columns, gated=m.gated)
            else None
            for m in self.parts
        }

    def us(self, forms: dict[str, Form | None], launch: str = "overlap") -> float:
        """Microseconds of a step with those forms."""
        return replay_us(partial(self._record, forms, launch))

    def bare_us(self) -> float:
        """Microseconds of the library's products without neighbours."""

        def record() -> None:
            for matrix, weight in self._steps():
                library(matrix, self._places[matrix.name], weight)

        return replay_us(record)

    def _steps(self) -> Iterator[tuple[Matrix, Tensor]]:
        weights = CHAIN_WEIGHTS[self.model]
        for layer in range(self._copies):
            for matrix in self.parts[:-1]:
                yield matrix, weights[matrix.name][layer]
        yield self.parts[-1], weights[self.parts[-1].name][0]

    def _record(self, forms: dict[str, Form | None], launch: str) -> None:
        pending = False
        for matrix, weight in self._steps():
            place, form = self._places[matrix.name], forms[matrix.name]
            # Experts leave a sum behind for the norm of the next queries, but none for the router.
            behind = pending or (matrix.behind_sum and matrix.name == "qkv")
            waiting = self._sum if behind and not matrix.head else None
            if form is None:
                unfused(matrix, place, weight, waiting, launch)
            else:
                fused(matrix, place, weight, form, waiting)
            pending = form is None if matrix.into else False

    def search(self) -> tuple[float, dict[str, Form | None]]:
        """Forms that make the chain fast, found by changing one matrix at a time."""
        candidates: dict[str, list[Form | None]] = {}
        for matrix in self.parts:
            times = self.swept(matrix)
            order = sorted(times, key=times.__getitem__)
            best = {form.way: form for form in reversed(order)}
            ways = sorted(best.values(), key=times.__getitem__)
            candidates[matrix.name] = list(dict.fromkeys([None, *ways[:5], *order[:4]]))
        starts = [
            {name: each[0] for name, each in candidates.items()},
            self.forms("any"),
            self.forms("registers overlap"),
            self.forms("lanes overlap"),
        ]
        least, forms = min(((self.us(each), each) for each in starts), key=lambda pair: pair[0])
        for _ in range(2):
            before = least
            for name, each in candidates.items():
                for form in each:
                    if form == forms[name]:
                        continue
                    tried = {**forms, name: form}
                    took = self.us(tried)
                    if took < least * 0.999:
                        least, forms = took, tried
            if least == before:
                break
        return least, forms


CHAIN_WEIGHTS: dict[str, dict[str, list[Tensor]]] = {}


def chains(
    model: str, rows: int, times: Times, *, swept: bool, division: Division
) -> tuple[str, list[str]]:
    """A line of the table, and lines for the tables of tiles."""
    chain = Chain(model, rows, times)
    measured: dict[str, list[float]] = {}
    lines: list[str] = []
    ways = ["checked in"]
    if swept:
        ways += sorted({form.way for m in chain.parts for form in chain.swept(m)})
    for percent in (-1, 100):
        division.set(percent)
        nothing: dict[str, Form | None] = {m.name: None for m in chain.parts}
        results = {
            "library bare": chain.bare_us(),
            "library order": chain.us(nothing, "order"),
            "library": chain.us(nothing),
        }
        results |= {way: chain.us(chain.forms(way)) for way in ways}
        if swept:
            results["search"], found = chain.search()
            lines.append(f"# {model} {rows} rows, {percent} %: {results['search'] / 1e3:.3f} ms")
            for matrix in chain.parts:
                form = found[matrix.name]
                shape = f"{rows}, {matrix.features}, {matrix.columns}, {matrix.gated}"
                shown = "the library" if form is None else f"{form.tile}{' apart' * form.apart}"
                lines.append(f"    ({shape}): {shown}")
        for way, took in results.items():
            measured.setdefault(way, []).append(took / 1e3)
    division.set(-1)
    shown = ", ".join(f"{way} {one:.3f}/{two:.3f}" for way, (one, two) in measured.items())
    return f"{model} {rows:3} rows: {shown}", lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--classes", nargs="+", type=int, choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="time the checked-in tiles only")
    options = parser.parse_args()
    classes = [] if options.quick else options.classes
    if classes:
        compile_all(list(jobs(options.models, classes)), options.workers)
    division = Division()
    table, lines = [], []
    for model in options.models:
        copies, parts = MODELS[model]
        found = sweep(model, classes)
        CHAIN_WEIGHTS[model] = {
            m.name: place_of(m, 1 if m.head else copies, 1).weights for m in parts
        }
        floor = sum(m.bytes * (1 if m.head else copies) for m in parts) / BYTES_PER_S * 1e3
        table.append(f"{model}: floor {floor:.3f} ms")
        for rows in ROWS:
            swept = rows in classes
            row, more = chains(model, rows, found, swept=swept, division=division)
            table.append(row)
            print("\n".join([*more, row]), flush=True)
            lines += more
        del CHAIN_WEIGHTS[model]
        torch.cuda.empty_cache()
    print("\n".join(lines))
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print("\n".join(table))


if __name__ == "__main__":
    main()
