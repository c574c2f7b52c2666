"""How near do the small Triton kernels come to what the device's memory allows, at the sizes of three models?

    python benchmarks/ops/gpu_small.py [--rows 1 8 32 128 256 8192] [--variants] [--only norm]

A measured graph calls an op once per copy of its inputs, and there are as many copies as push each other out of
the cache (few rows fit it: there the time of a launch shows). Prints microseconds per call, and what share of them
the bytes that a call must move take at 4.15 TB/s. `--variants` also measures other tiles and warps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

from tokamak.ops.activation import triton as activation
from tokamak.ops.embedding import triton as embedding
from tokamak.ops.norm import triton as norm
from tokamak.ops.rope import triton as rope
from tokamak.ops.sample import triton as sample
from tokamak.ops.step_prep import fill_step
from tokamak.ops.step_prep import triton as step_prep
from tokamak.ops.walk_plan.triton import triton_fill_walk_plan

BYTES_PER_US = 4.15e6
CACHE_BYTES = 120 << 20
MIN_COPIES, MAX_COPIES = 8, 64
REPLAYS = 20
MODELS = {
    "0.6B": {"width": 1024, "heads": (16, 8), "norms": True, "inner": 3072, "vocab": 151936},
    "8B": {"width": 4096, "heads": (32, 8), "norms": False, "inner": 14336, "vocab": 128256},
    "30B-A3B": {"width": 2048, "heads": (32, 4), "norms": True, "inner": 768, "vocab": 151936},
}
HEAD_DIM, BLOCK_TOKENS, PLACES = 128, 16, 4096

Call = Callable[[], object]
Make = Callable[..., tuple[Call, int]]
"""Makes a call with fresh inputs for some rows, and counts the bytes it must move."""


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def size_of(*tensors: Tensor) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def microseconds(calls: Sequence[Call]) -> float:
    """The median over replays of a graph with all calls, per call."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def add_rms_norm(rows: int, width: int) -> tuple[Call, int]:
    x, stream, weight = numbers(rows, width), numbers(rows, width), numbers(width)
    moved = 2 * size_of(x, stream) + size_of(weight)
    return lambda: norm.triton_add_rms_norm(x, stream, weight, 1e-6), moved


def rms_norm(rows: int, width: int) -> tuple[Call, int]:
    x, weight = numbers(rows, width), numbers(width)
    return lambda: norm.triton_rms_norm(x, weight, 1e-6), 2 * size_of(x) + size_of(weight)


def add_residual(rows: int, width: int) -> tuple[Call, int]:
    x, stream = numbers(rows, width), numbers(rows, width)
    return lambda: norm.triton_add_residual(x, stream), 3 * size_of(x)


def silu_mul(rows: int, inner: int) -> tuple[Call, int]:
    gate_up = numbers(rows, 2 * inner)
    return lambda: activation.triton_silu_mul(gate_up), size_of(gate_up) * 3 // 2


def embed(rows: int, table: Tensor) -> tuple[Call, int]:
    token_ids = torch.randint(0, len(table), (rows,), device="cuda").int()
    return lambda: embedding.triton_embed(token_ids, table), 4 * rows * table.shape[1]


def rotate(rows: int, heads: int, kv_heads: int, norms: bool) -> tuple[Call, int]:
    qkv = numbers(rows, (heads + 2 * kv_heads) * HEAD_DIM)
    positions = torch.randint(0, PLACES, (rows,), device="cuda").int()
    cos_sin = torch.rand((PLACES, HEAD_DIM), device="cuda")
    blocks = -(-rows // BLOCK_TOKENS) + 1
    caches = numbers(blocks, 2, kv_heads, BLOCK_TOKENS, HEAD_DIM)
    slots = torch.arange(rows, device="cuda")
    q_norm, k_norm = (numbers(HEAD_DIM) if norms else None for _ in range(2))
    moved = 2 * size_of(qkv) + rows * HEAD_DIM * 4

    def call() -> object:
        return rope.triton_rotate_and_cache(
            qkv, positions, cos_sin, caches[:, 0], caches[:, 1], slots, q_norm, k_norm, 1e-6
        )

    return call, moved


def argmax(rows: int, vocab: int, dtype: torch.dtype) -> tuple[Call, int]:
    logits = numbers(rows, vocab).to(dtype)
    return lambda: sample.triton_argmax_rows(logits), size_of(logits)


def torch_argmax(rows: int, vocab: int) -> tuple[Call, int]:
    logits = numbers(rows, vocab)
    return lambda: logits.argmax(dim=1), size_of(logits)


def weights(rows: int, vocab: int) -> tuple[Call, int]:
    scores = torch.randn((rows, vocab), device="cuda")
    peaks, inverses = scores.amax(dim=1), torch.rand(rows, device="cuda") + 0.5
    return lambda: sample.triton_token_weights(scores, peaks, inverses), 2 * size_of(scores)


def fill(rows: int, prompts: int, granted: int, run: Callable[..., None]) -> tuple[Call, int]:
    """Decode rows behind 1,100 tokens, or prompts that share so many token rows."""
    requests, each = (prompts, rows // prompts) if prompts else (rows, 1)
    ints = {"dtype": torch.int32, "device": "cuda"}
    before, columns, blocks = (0 if prompts else 1100), 70 if not prompts else 512, 2560
    slots = torch.arange(1, requests + 1, **ints)
    tables = torch.randint(1, 9000, (1, 257, blocks), **ints)
    grants = torch.randint(1, 64, (4, granted), **ints)
    grants[0], grants[2] = 0, torch.arange(granted, **ints) % 64
    grants[1] = torch.arange(granted, **ints) // 64 + 1
    arguments = (
        slots,
        torch.full((requests,), before, **ints),
        torch.arange(requests + 1, **ints) * each,
        grants,
        torch.randint(0, 9000, (257, 40961), **ints),
        tables,
        requests,
        requests * each,
        BLOCK_TOKENS,
        min(columns, blocks),
        torch.zeros(requests * each, **ints),
        torch.zeros(requests * each, **ints),
        torch.zeros((1, requests * each), dtype=torch.int64, device="cuda"),
        torch.zeros((1, requests, blocks), **ints),
    )
    return lambda: run(*arguments), 24 * requests * each + 8 * requests * columns


def indptrs(rows: int) -> tuple[Call, int]:
    lengths = torch.randint(1, 9000, (rows,), device="cuda").int()
    out = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
    return lambda: step_prep.triton_fill_indptrs(lengths, BLOCK_TOKENS, out), 8 * rows


def tiles(rows: int) -> tuple[Call, int]:
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * 32
    out = torch.zeros((rows * 3, 2), dtype=torch.int32, device="cuda")
    return lambda: step_prep.triton_fill_unit_tiles(starts, 16, out), 28 * rows


def walk(rows: int) -> tuple[Call, int]:
    positions = torch.randint(0, 90_000, (rows,), device="cuda").int()
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    plans = torch.zeros((1, 264, 4), dtype=torch.int32, device="cuda")
    run = triton_fill_walk_plan
    return lambda: run(starts, positions, 1, 1, 512, rows, plans), 8 * rows + 16 * 264


def copies_of(make: Make, *sizes: object) -> tuple[list[Call], int]:
    """As many calls with inputs of their own as the cache does not hold, and the bytes of one."""
    first, moved = make(*sizes)
    count = min(max(CACHE_BYTES // max(moved, 1), MIN_COPIES), MAX_COPIES)
    return [first, *(make(*sizes)[0] for _ in range(count - 1))], moved


class Report:
    """Measures, and keeps what was found by op, variant and rows."""

    def __init__(self, only: str) -> None:
        self._only = only
        self._found: dict[tuple[str, str], dict[int, str]] = {}

    def add(self, op: str, what: str, make: Make, rows: int, *sizes: object) -> None:
        if self._only in op:
            calls, moved = copies_of(make, rows, *sizes)
            time = microseconds(calls)
            share = moved / BYTES_PER_US / time
            self._found.setdefault((op, what), {})[rows] = f"{time:.2f} {share:4.0%}"

    def show(self) -> None:
        every_rows = sorted({rows for line in self._found.values() for rows in line})
        print(f"{'op':13}{'rows':20}" + "".join(f"{rows:>13}" for rows in every_rows))
        for (op, what), line in self._found.items():
            times = "".join(f"{line.get(rows, ''):>13}" for rows in every_rows)
            print(f"{op:13}{what:20}{times}")


@contextmanager
def changed(module: ModuleType, **values: object) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def measure_models(report: Report, every_rows: Sequence[int]) -> None:
    for name, model in MODELS.items():
        width, inner, vocab, norms = (model[k] for k in ("width", "inner", "vocab", "norms"))
        heads, kv_heads = model["heads"]
        table = numbers(vocab, width)
        for rows in every_rows:
            report.add("add_rms_norm", name, add_rms_norm, rows, width)
            report.add("add_residual", name, add_residual, rows, width)
            report.add("silu_mul", name, silu_mul, rows, inner)
            report.add("embed", name, embed, rows, table)
            report.add("rotate", name, rotate, rows, heads, kv_heads, norms)
        del table
    for rows in every_rows:
        report.add("rms_norm", "1024", rms_norm, rows, 1024)
    for rows in (each for each in every_rows if each <= 256):
        report.add("argmax", "bf16", argmax, rows, 151936, torch.bfloat16)
        report.add("argmax", "float32", argmax, rows, 151936, torch.float32)
        report.add("argmax", "bf16, torch", torch_argmax, rows, 151936)
        report.add("weights", "float32", weights, rows, 151936)
        for run in (step_prep.triton_fill_step, fill_step.reference):
            how = "ours" if run is step_prep.triton_fill_step else "torch"
            report.add("fill", f"decode, {how}", fill, rows, 0, rows // 16, run)
        report.add("indptrs", "", indptrs, rows)
        report.add("tiles", "", tiles, rows)
        if rows < 264:
            report.add("walk plan", "", walk, rows)
    for prompts in (1, 8):
        make = step_prep.triton_fill_step
        report.add("fill", f"{prompts} prompts", fill, 8192, prompts, 512, make)


def measure_variants(report: Report) -> None:
    for rows in (1, 128, 8192):
        for width in (1024, 2048, 4096):
            for warps in (1, 2, 4, 8, 16):
                with changed(norm, warps_for=lambda _, warps=warps: warps):
                    what = f"{width}, {warps} warps"
                    report.add("add_rms_norm", what, add_rms_norm, rows, width)
        for inner in (3072, 14336):
            for tile, warps in ((512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8)):
                with changed(activation, TILE=tile, WARPS=warps):
                    what = f"{inner}, {tile}, {warps} warps"
                    report.add("silu_mul", what, silu_mul, rows, inner)
        for heads, kv_heads in ((16, 8), (32, 8)):
            for tile, per_warp in ((4, 256), (4, 512), (8, 256), (8, 512), (8, 1024), (16, 512)):
                with changed(rope, MAX_TILE_HEADS=tile, NUMBERS_PER_WARP=per_warp):
                    what = f"{heads}+{kv_heads}, {tile} of {per_warp}"
                    report.add("rotate", what, rotate, rows, heads, kv_heads, True)
    for rows in (1, 8, 32, 256):
        for tile, per_warp in ((1024, 256), (2048, 256), (2048, 512), (4096, 512)):
            for parts in (256, 512, 1024, 2048):
                with changed(sample, MAX_TILE=tile, NUMBERS_PER_WARP=per_warp, PARTS_IN_ALL=parts):
                    what = f"{tile}/{per_warp}, {parts}"
                    report.add("argmax", what, argmax, rows, 151936, torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 256, 8192])
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--only", default="", help="measure ops whose name holds this")
    options = parser.parse_args()
    torch.manual_seed(0)
    report = Report(options.only)
    if options.variants:
        measure_variants(report)
    measure_models(report, options.rows)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    report.show()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
