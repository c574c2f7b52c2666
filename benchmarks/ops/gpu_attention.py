"""How long does paged attention take on a GPU, form by form, and how far is it from what memory and matrix units allow?

    python benchmarks/ops/gpu_attention.py [decode prefill] [--quick] [--workers 12]

Heads are Qwen3-0.6B's (16 query and 8 key heads), Llama-3-8B's (32/8) and Qwen3-30B-A3B's (32/4), all of 128 in
bfloat16, blocks of 16 tokens. Decode: contexts around 1,100 tokens, block tables of 40,960; calls over the caches of
many layers are recorded in one graph, so keys come from memory; a figure is one call, its graph nodes included. Forms
are those of the kernel that rotates, caches and attends; "apart" are rotation and attention as two. Prefill:
whole prompts, and chunks behind a prefix; beside it, gathered keys with PyTorch's fused attention. Forms are compiled
by several processes before anything is timed. Every form is compared with the reference; the best
forms come last.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.runtime.errors import OutOfResources

from tokamak.ops.case import difference
from tokamak.ops.paged_attention.cases import paged_attention_cases
from tokamak.ops.paged_attention.reference import paged_attention
from tokamak.ops.paged_attention.triton import TritonAttention
from tokamak.ops.paged_attention.triton_decode import (
    IN_ORDER,
    DecodeForm,
    choose_form,
    splits_of,
)
from tokamak.ops.paged_attention.triton_prefill import PrefillForm, paged_prefill
from tokamak.ops.paged_attention.triton_prefill import choose_form as choose_prefill
from tokamak.ops.paged_attention.triton_sm90 import OVERLAPPED
from tokamak.ops.rope.triton import triton_rotate_and_cache
from tokamak.ops.rotate_cache_attend import rotate_cache_attend
from tokamak.ops.rotate_cache_attend.triton import TritonDecode
from tokamak.ops.rotate_cache_attend.triton_sm90 import fetch

HEADS = {"0.6B": (16, 8), "8B": (32, 8), "30B": (32, 4)}
NORMED = ("0.6B", "30B")
"""Models that norm heads."""
DIM, BLOCK_TOKENS, TABLE_TOKENS = 128, 16, 40960
BATCHES = (1, 8, 32, 128, 256)
CONTEXT = (1024, 1152)
BYTES_PER_S = 4.15e12
CACHES_BYTES = 3 << 29
"""What the rotating caches take; many times the L2."""
MOST_LAYERS = 28
PROMPTS = {
    "8 x 1024": [(1024, 0)] * 8,
    "1 x 8192": [(8192, 0)],
    "16 x 512": [(512, 0)] * 16,
    "4 x 1024 after 1024": [(1024, 1024)] * 4,
    "2048 of 30 mixed": [(37 + 61 * at % 97, 53 * at % 400) for at in range(30)],
}
FEW_FORMS = [
    DecodeForm(0, tile, warps, 3, merge, ahead)
    for tile, warps in [(16, 1), (32, 2), (32, 4), (64, 4)]
    for merge in ("here", "after")
    for ahead in (False, True)
]
"""For steps that are split; splits are filled in."""
MANY_FORMS = [
    DecodeForm(splits, tile, warps, stages, "here")
    for splits in (1, 2)
    for tile, warps, stages in [
        (32, 2, 3), (32, 4, 3), (32, 4, 4), (64, 4, 3), (64, 8, 3), (128, 4, 2), (128, 8, 2),
    ]
]  # fmt: skip
PREFILL_FORMS = [
    PrefillForm(rows, tile, warps, stages, one_loop)
    for rows, tile, warps, stages in [
        (64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 8, 3), (128, 64, 8, 2),
        (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3),
    ]
    for one_loop in (False, True)
]  # fmt: skip

Call = Callable[[], object]
Launch = Mapping[str, object]


def _launch() -> Launch:
    """How decode kernels start on this device."""
    return OVERLAPPED if torch.cuda.get_device_capability()[0] == 9 else IN_ORDER


@lru_cache(maxsize=1)
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def _timed(calls: list[Call], repeats: int = 7) -> float:
    """Seconds of one call: the median of some replays of a graph of all of them."""
    stream, graph = _stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    spans = []
    with torch.cuda.stream(stream):
        calls[0]()
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
        graph.replay()
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            spans.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(spans)


def _caches(blocks: int, kv_heads: int, layers: int) -> list[tuple[Tensor, Tensor]]:
    shape = (2, blocks + 1, kv_heads, BLOCK_TOKENS, DIM)
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
    return [(each[0], each[1]) for each in made]


def _table(lengths: list[int], width: int) -> Tensor:
    """Blocks in no order, as a server hands them out."""
    blocks = [-(-length // BLOCK_TOKENS) for length in lengths]
    ids = iter((torch.randperm(sum(blocks)) + 1).tolist())
    table = torch.zeros((len(lengths), width), dtype=torch.int32)
    for row, count in enumerate(blocks):
        table[row, :count] = torch.tensor(list(itertools.islice(ids, count)))
    return table.cuda()


class Decode:
    """Decode calls of one model and batch, over many layers' caches."""

    def __init__(self, heads: int, kv_heads: int, requests: int, *, norms: bool) -> None:
        chance = torch.Generator().manual_seed(requests)
        lengths = torch.randint(*CONTEXT, (requests,), generator=chance, dtype=torch.int32)
        self.table = _table(lengths.tolist(), TABLE_TOKENS // BLOCK_TOKENS)
        blocks = int((-(-lengths // BLOCK_TOKENS)).sum())
        self.bytes = int(lengths.sum()) * kv_heads * DIM * 2 * 2
        layers = min(max(CACHES_BYTES // self.bytes, 3), MOST_LAYERS)
        self.caches = _caches(blocks, kv_heads, layers)
        self.lengths = lengths.cuda()
        self.starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
        self.positions = self.lengths - 1
        blocks_at = self.table.gather(1, (self.positions // BLOCK_TOKENS).long()[:, None])[:, 0]
        self.slots = blocks_at.long() * BLOCK_TOKENS + self.positions % BLOCK_TOKENS
        width = (heads + 2 * kv_heads) * DIM
        self.qkv = torch.randn((requests, width), device="cuda", dtype=torch.bfloat16)
        angles = torch.rand((TABLE_TOKENS, DIM // 2), device="cuda") * 6.3
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        weight = torch.rand(DIM, device="cuda", dtype=torch.bfloat16) + 0.5
        self.norms = (weight, weight) if norms else (None, None)
        self.out = torch.empty((requests, heads, DIM), device="cuda", dtype=torch.bfloat16)

    def _arguments(self, layer: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What rotation takes, and what attention takes after the caches."""
        rotation = (
            self.qkv, self.positions, self.cos_sin, *self.caches[layer], self.slots, *self.norms, 1e-6,
        )  # fmt: skip
        return rotation, (self.table, self.lengths, self.starts, 1, DIM**-0.5, 0, self.out)

    def call(
        self, form: DecodeForm, layer: int, launch: Launch | None = None, *, asks: bool = True
    ) -> None:
        """One layer. `asks`: whether it asks for blocks ahead, where the device can."""
        rotation, attention = self._arguments(layer)
        launch = launch or _launch()
        asking = fetch if asks and launch is OVERLAPPED else None
        TritonDecode(launch, asking, form).rotate_cache_attend(*rotation, *attention)

    def apart(self, layer: int) -> None:
        """One layer, in two launches."""
        rotation, attention = self._arguments(layer)
        q = triton_rotate_and_cache(*rotation)
        TritonAttention(_launch()).paged_attention(q, *self.caches[layer], *attention)

    def reference(self) -> None:
        """The first layer."""
        rotation, attention = self._arguments(0)
        rotate_cache_attend.reference(*rotation, *attention)

    def seconds(self, call: Callable[[int], None]) -> float:
        """One call, which takes the layer."""
        return _timed([partial(call, layer) for layer in range(len(self.caches))])


class Prefill:
    """A prefill call: queries and tokens computed before, by request."""

    def __init__(self, heads: int, kv_heads: int, rows: list[tuple[int, int]]) -> None:
        self.rows, self.groups = rows, heads // kv_heads
        lengths = [queries + before for queries, before in rows]
        self.table = _table(lengths, -(-max(lengths) // BLOCK_TOKENS))
        self.k, self.v = _caches(int((self.table > 0).sum()), kv_heads, 1)[0]
        self.lengths = torch.tensor(lengths, dtype=torch.int32).cuda()
        starts = torch.tensor([0, *(queries for queries, _ in rows)]).cumsum(0)
        self.starts = starts.int().cuda()
        self.q = torch.randn((int(starts[-1]), heads, DIM), device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        scores = sum(queries * before + queries * (queries + 1) // 2 for queries, before in rows)
        self.operations = 4 * heads * DIM * scores

    def reference(self) -> None:
        """One call of the reference."""
        paged_attention(
            self.q, self.k, self.v, self.table, self.lengths, self.starts, 0, DIM**-0.5, 0, self.out
        )  # fmt: skip

    def call(self, form: PrefillForm) -> None:
        """One call."""
        paged_prefill(
            self.q, self.k, self.v, self.table, self.lengths, self.starts, DIM**-0.5, 0, self.out, form
        )  # fmt: skip

    def seconds(self, form: PrefillForm) -> float:
        """One call."""
        return _timed([partial(self.call, form)] * 4)

    @property
    def even(self) -> bool:
        """Whether requests are whole prompts of one length."""
        return len(set(self.rows)) == 1 and not self.rows[0][1]

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Keys and values side by side, each [requests, kv_heads, tokens, head_dim]."""
        kv_heads, wanted = self.k.shape[1], self.table.flatten()
        shape = (len(self.rows), -1, kv_heads, BLOCK_TOKENS, DIM)
        k, v = (each.index_select(0, wanted).view(shape) for each in (self.k, self.v))
        k, v = (each.transpose(1, 2).reshape(len(self.rows), kv_heads, -1, DIM) for each in (k, v))
        return k, v

    def fused(self, backend: SDPBackend) -> dict[str, float]:
        """Seconds of gathering, and of PyTorch's attention over what was gathered."""
        keys, values = self.gathered()
        queries = self.q.view(len(self.rows), -1, self.q.shape[1], DIM).transpose(1, 2)

        def attend() -> None:
            with sdpa_kernel(backend):
                scaled_dot_product_attention(
                    queries, keys, values, is_causal=True, scale=DIM**-0.5, enable_gqa=True
                )

        return {"gather": _timed([self.gathered] * 2), "attend": _timed([attend] * 2)}


def _processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def _decode_forms(requests: int, kv_heads: int) -> list[DecodeForm]:
    splits = splits_of(requests, kv_heads, _processors())
    if splits == 1:
        return MANY_FORMS
    return [
        replace(form, splits=count)
        for count in (splits // 2, splits, splits * 2)
        for form in FEW_FORMS
    ]


def _obstacle(call: Call) -> str:
    """An empty string, or why a form cannot run: it wants more shared memory than there is."""
    try:
        call()
    except OutOfResources as error:
        return str(error)
    return ""


def _compile(at: int, workers: int, kinds: list[str], models: list[str]) -> None:
    """Compile every `workers`-th form into Triton's folder on disk."""
    on_device = partial(_on_device, TritonAttention(_launch()).paged_attention)
    jobs: list[Call] = [partial(case.outcome, on_device) for case in paged_attention_cases]
    for name in models:
        heads, kv_heads = HEADS[name]
        if "decode" in kinds:
            one = Decode(heads, kv_heads, 1, norms=name in NORMED)
            forms = {form for n in BATCHES for form in _decode_forms(n, kv_heads)}
            jobs += [
                partial(one.call, form, 0)
                for form in sorted(
                    forms, key=lambda f: (f.splits, f.tile, f.warps, f.stages, f.merge, f.ahead)
                )
            ]
        if "prefill" in kinds:
            prompt = Prefill(heads, kv_heads, [(200, 0)])
            jobs += [partial(prompt.call, form) for form in PREFILL_FORMS]
    for job in jobs[at::workers]:
        _obstacle(job)


def _compile_all(workers: int, kinds: list[str], models: list[str]) -> None:
    spawned = multiprocessing.get_context("spawn")
    with spawned.Pool(workers) as pool:
        pool.starmap(_compile, [(at, workers, kinds, models) for at in range(workers)])


def _on_device(call: Callable[..., object], *arguments: object) -> None:
    """Run on the device what a case made on the CPU, and bring back what it changes."""
    moved = [each.cuda() if isinstance(each, Tensor) else each for each in arguments]
    call(*moved)
    for there, here in zip(moved, arguments, strict=True):
        if isinstance(here, Tensor) and isinstance(there, Tensor):
            here.copy_(there)


def check() -> None:
    """Compare the backend of paged attention with the reference over the cases."""
    on_device = partial(_on_device, TritonAttention(_launch()).paged_attention)
    gaps = {
        str(case): difference(case.outcome(on_device), case.outcome(paged_attention))
        / case.tolerance
        for case in paged_attention_cases
    }
    bad = {name: gap for name, gap in gaps.items() if not gap <= 1}
    print(f"cases: {len(gaps)}, beyond tolerance: {bad or 'none'}")


def _check_forms(
    out: Tensor, reference: Call, calls: Iterable[tuple[DecodeForm | PrefillForm, Call]]
) -> None:
    """Compare every form with the reference on one large step, a few times."""
    reference()
    expected = out.clone()
    for form, call in calls:
        for _ in range(3):
            out.fill_(float("nan"))
            call()
            gap = difference([out], [expected])
            if not gap <= 2.0**-6:
                print(f"WRONG by {gap:.3g}: {_name(form)}")


def _name(form: DecodeForm | PrefillForm) -> str:
    loop = f"tile {form.tile} warps {form.warps} stages {form.stages}"
    if isinstance(form, DecodeForm):
        return f"splits {form.splits} {form.merge} {loop}{' ahead' if form.ahead else ''}"
    return f"rows {form.rows} {loop} {'one loop' if form.one_loop else ''}"


def decode_table(models: list[str], *, quick: bool) -> list[str]:
    """Lines of the chosen form, the best ones and the best that merges afterwards, by model and batch."""
    lines = []
    for model, requests in itertools.product(models, BATCHES):
        heads, kv_heads = HEADS[model]
        step = Decode(heads, kv_heads, requests, norms=model in NORMED)
        chosen = choose_form(requests, kv_heads, 2 * DIM, torch.device("cuda", 0))
        others = [] if quick else _decode_forms(requests, kv_heads)
        forms = [chosen, *(form for form in others if form != chosen)]
        calls = {form: partial(step.call, form, 0) for form in forms}
        calls = {form: call for form, call in calls.items() if not _obstacle(call)}
        if requests <= 32:
            _check_forms(step.out, step.reference, calls.items())
        timed = {form: step.seconds(partial(step.call, form)) for form in calls}
        best = sorted(timed, key=lambda form: timed[form])
        not_asking = step.seconds(partial(step.call, chosen, asks=False))
        in_order = step.seconds(partial(step.call, chosen, launch=IN_ORDER))
        after = [form for form in best if form.merge == "after"][:1]
        loop = [form for form in best if not form.ahead][:1]
        labelled = [
            ("chosen", chosen, timed[chosen]),
            ("chosen, not asking", chosen, not_asking),
            ("chosen, in order", chosen, in_order),
            ("chosen, apart", chosen, step.seconds(step.apart)),
            *(("best", form, timed[form]) for form in best[:4]),
            *(("best after", form, timed[form]) for form in after),
            *(("best in a loop", form, timed[form]) for form in loop),
        ]
        for label, form, spent in labelled:
            lines.append(
                f"{model} {requests}: {spent * 1e6:.2f} us (floor {step.bytes / BYTES_PER_S * 1e6:.2f}) "
                f"{step.bytes / spent / 1e12:.2f} TB/s {label} {_name(form)}"
            )
        del step, calls
        torch.cuda.empty_cache()
    return lines


def prefill_table(models: list[str], *, quick: bool) -> list[str]:
    """Lines of the chosen form, the best ones and PyTorch's attention, by model and prompts."""
    lines = []
    for model, (title, rows) in itertools.product(models, PROMPTS.items()):
        heads, kv_heads = HEADS[model]
        step = Prefill(heads, kv_heads, rows)
        each = sum(queries for queries, _ in rows) // len(rows)
        chosen = choose_prefill(heads // kv_heads, DIM, 2, each)
        forms = {chosen, *([] if quick else PREFILL_FORMS)}
        calls = {form: partial(step.call, form) for form in forms}
        calls = {form: call for form, call in calls.items() if not _obstacle(call)}
        if max(queries for queries, _ in rows) <= 1024:
            _check_forms(step.out, step.reference, calls.items())
        timed = {form: step.seconds(form) for form in calls}
        best = sorted(timed, key=lambda form: timed[form])
        for label, form in [("chosen", chosen), *(("best", form) for form in best[:2])]:
            rate = step.operations / timed[form] / 1e12
            spent = timed[form] * 1e6
            lines.append(
                f"{model} {title}: {spent:.1f} us {rate:.0f} TFLOP/s {label} {_name(form)}"
            )
        if step.even:
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                lines.append(f"{model} {title}: {_fused_line(step, backend)}")
        del step, calls
        torch.cuda.empty_cache()
    return lines


def _fused_line(step: Prefill, backend: SDPBackend) -> str:
    try:
        spans = step.fused(backend)
    except RuntimeError as error:
        return f"{backend.name} does not run: {str(error).splitlines()[0][:80]}"
    rate = step.operations / spans["attend"] / 1e12
    return (
        f"{spans['attend'] * 1e6:.1f} us {rate:.0f} TFLOP/s {backend.name}, "
        f"and {spans['gather'] * 1e6:.1f} us of gathering"
    )


def main() -> None:
    """Check, compile, time, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=["decode", "prefill"])
    parser.add_argument("--models", nargs="*", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--quick", action="store_true", help="the chosen forms alone")
    parser.add_argument("--workers", type=int, default=12)
    options = parser.parse_args()
    if not options.quick:
        _compile_all(options.workers, options.kinds, options.models)
        check()
    lines: list[str] = []
    if "decode" in options.kinds:
        lines += decode_table(options.models, quick=options.quick)
    if "prefill" in options.kinds:
        lines += prefill_table(options.models, quick=options.quick)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
