"""How long does a GPU take to draw tokens, beside what reading the scores takes and beside passes of PyTorch?

    python benchmarks/ops/gpu_sample.py [--rows 1 8 32 128 256] [--vocab 151936] [--variants]

A measured graph draws once per copy of the scores, and the copies push each other out of the cache. Prints
microseconds: of the op `draw_rows`, of reading the scores once at 4.15 TB/s, and of a way that sorts or searches in
several passes of PyTorch. `flat` scores are those of a model without a preference: the nucleus is most of the
vocabulary. `--variants` also measures other tiles and warps; `--only` names one kind. Last, the share of rows whose
token is that of the CPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tokamak.device.facts import device_facts
from tokamak.ops.load import load_backends
from tokamak.ops.sample import draw_by_id, draw_rows, first_above, triton_draw
from tokamak.ops.sample import triton as sample
from tokamak.ops.sample.cases import draw_table
from tokamak.ops.sample.uniform import uniforms_of

BYTES_PER_US = 4.15e6
CACHE_BYTES = 120 << 20
MAX_COPIES = 64
REPLAYS = 15
SORTED_ROWS = 64
CHECKED_ROWS = 64
KINDS: dict[str, tuple[bool, Mapping[str, float]]] = {
    "greedy": (False, {"temperature": 0.0}),
    "temperature": (False, {"temperature": 0.8}),
    "top-k 50": (False, {"top_k": 50}),
    "top-k, top-p": (False, {"top_k": 50, "top_p": 0.9, "temperature": 0.7}),
    "top-p 0.9": (False, {"top_p": 0.9}),
    "min-p 0.05": (False, {"min_p": 0.05}),
    "flat top-k 50": (True, {"top_k": 50}),
    "flat top-p 0.9": (True, {"top_p": 0.9}),
    "flat min-p 0.01": (True, {"min_p": 0.01}),
}
VARIANTS = [
    {"ROW_TILE": tile, "LIST_TILE": list_tile, "ROW_WARPS": warps}
    for tile, list_tile, warps in (
        (1024, 128, 4), (1024, 256, 8), (2048, 256, 8), (2048, 512, 16), (4096, 256, 16),
    )
] + [
    {"PARTS_IN_ALL": parts, "PART_WARPS": warps}
    for parts, warps in ((2048, 4), (4096, 2), (4096, 8), (16384, 4), (65536, 4))
]  # fmt: skip

Call = Callable[[], object]


def scores_of(rows: int, vocab: int, *, flat: bool) -> Tensor:
    """Scores like a language model's, or normal ones: [rows, vocab] float32."""
    generator = torch.Generator("cuda").manual_seed(rows)
    tail = torch.randn((rows, vocab), generator=generator, device="cuda")
    if flat:
        return tail
    likely = torch.randint(0, vocab, (rows, 60), generator=generator, device="cuda")
    return (tail * 2).scatter(1, likely, torch.linspace(16, 8, 60, device="cuda").expand(rows, -1))


def arguments(rows: int, vocab: int, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flat, asked = KINDS[kind]
    table = draw_table([asked] * rows, vocab)
    table[:, 4] = torch.arange(rows) * 7919
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    return scores_of(rows, vocab, flat=flat), table.cuda(), slots, slots + 1000


def in_passes(kind: str, scores: Tensor, table: Tensor, positions: Tensor) -> Call:
    """The same draw in several passes, as PyTorch has them; what the host knows chooses them."""
    _, asked = KINDS[kind]
    top_k, top_p, min_p = asked.get("top_k", 0), asked.get("top_p", 1.0), asked.get("min_p", 0.0)
    temperature = asked.get("temperature", 1.0)

    def by_id(scores: Tensor, peaks: Tensor) -> tuple[Tensor, Tensor]:
        inverses = torch.full_like(peaks, 1.0 / temperature)
        weights, sums = sample.triton_token_weights(scores, peaks, inverses)
        return weights, sums.double().cumsum(dim=1)

    def among(scores: Tensor, uniforms: Tensor) -> Tensor:
        peaks = scores.amax(dim=1)
        if top_k:
            values, ids = scores.topk(int(top_k), dim=1)
        else:
            values, ids = scores.sort(dim=1, descending=True, stable=True)
        weights = torch.exp((values.double() - peaks[:, None].double()) / temperature)
        sums = weights.cumsum(dim=1)
        kept = torch.full_like(ids[:, :1], ids.shape[1])
        if top_p < 1.0:
            left = sums[:, -1:] if top_k else by_id(scores, peaks)[1][:, -1:]
            kept = torch.minimum(kept, (sums < top_p * left).sum(dim=1, keepdim=True) + 1)
        if min_p > 0.0:
            kept = torch.minimum(kept, (weights >= min_p).sum(dim=1, keepdim=True))
        total = sums.gather(1, kept.clamp(1, ids.shape[1]) - 1)
        return ids.gather(1, first_above(sums, total * uniforms, total))

    def run() -> object:
        if not temperature:
            return sample.triton_argmax_rows(scores)
        uniforms = uniforms_of(table[:, 4:5], positions[:, None])
        if kind == "temperature":
            return draw_by_id(*by_id(scores, scores.amax(dim=1)), uniforms)
        parts = zip(scores.split(SORTED_ROWS), uniforms.split(SORTED_ROWS), strict=True)
        return torch.cat([among(*part) for part in parts])

    return run


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
    times: list[float] = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def copies_of(scores: Tensor) -> list[Tensor]:
    """The scores, as often as pushes them out of the cache."""
    count = min(max(2, -(-CACHE_BYTES // scores.nbytes)), MAX_COPIES)
    return [scores.clone() for _ in range(count)]


def draws(rows: int, vocab: int, kind: str) -> float:
    scores, *rest = arguments(rows, vocab, kind)
    return microseconds(
        [lambda each=each: triton_draw.triton_draw_rows(each, *rest) for each in copies_of(scores)]
    )


def passes(rows: int, vocab: int, kind: str) -> float:
    scores, table, _, positions = arguments(rows, vocab, kind)
    copies = copies_of(scores)[:4] if "top-p" in kind or "min-p" in kind else copies_of(scores)
    return microseconds([in_passes(kind, each, table, positions) for each in copies])


@contextmanager
def numbers_of(variant: Mapping[str, int]) -> Iterator[None]:
    before = {name: getattr(triton_draw, name) for name in variant}
    for name, value in variant.items():
        setattr(triton_draw, name, value)
    yield
    for name, value in before.items():
        setattr(triton_draw, name, value)


def print_row(title: str, values: Sequence[str]) -> None:
    print(f"{title:>16} " + " ".join(f"{value:>15}" for value in values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--variants", action="store_true")
    options = parser.parse_args()
    load_backends()
    kinds = [options.only] if options.only else [*KINDS]
    print(device_facts("cuda").arch, "vocabulary", options.vocab)

    if options.variants:
        for variant in VARIANTS:
            print(f"\n{variant}")
            print_row("rows", kinds)
            with numbers_of(variant):
                for rows in options.rows:
                    print_row(
                        f"{rows}", [f"{draws(rows, options.vocab, kind):.1f}" for kind in kinds]
                    )

    print("\nmicroseconds: draw_rows / reading once / in passes")
    print_row("rows", kinds)
    for rows in options.rows:
        floor = rows * options.vocab * 4 / BYTES_PER_US
        cells = [
            f"{draws(rows, options.vocab, kind):.1f}/{floor:.1f}/{passes(rows, options.vocab, kind):.0f}"
            for kind in kinds
        ]
        print_row(f"{rows}", cells)

    same: list[str] = []
    for kind in kinds:
        inputs = arguments(CHECKED_ROWS, options.vocab, kind)
        expected = draw_rows.reference(*(each.cpu() for each in inputs))[0]
        found = triton_draw.triton_draw_rows(*inputs)[0].cpu()
        same.append(f"{(found == expected).float().mean().item():.3f}")
    print_row("same as CPU", same)


if __name__ == "__main__":
    main()
