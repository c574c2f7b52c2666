"""Toy models whose forwards are recorded: dense, with experts, and sparse with a derived table.

Their region bodies read the installed context as real ones do: rows that were scheduled, caches by layer.
A forward takes StepInputs and returns hidden states [tokens, WIDTH] in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tokamak.cache.view import PagedBuffers
from tokamak.core.context import StepContext, current, installed
from tokamak.core.inputs import AttnStep, StepInputs
from tokamak.core.plan import Mode, StepShape
from tokamak.graphs.backend import GraphBackend
from tokamak.graphs.buffers import StaticBuffers
from tokamak.graphs.ladder import Ladder
from tokamak.graphs.region import Manifest, begin_forward, eager_region
from tokamak.graphs.request_graph import ReqGraph
from tokamak.graphs.sim import SimBackend
from tokamak.graphs.streams import SideStreams
from tokamak.graphs.token_graph import TokenGraph

WIDTH = 16
VOCABULARY = 50
EXPERTS = 4
BLOCK_TOKENS = 4
SMALL_CHUNK_BYTES = 4096
CPU = torch.device("cpu")

Forward = Callable[[StepInputs], Tensor]


@eager_region("toy_attention")
def toy_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
    """Write keys and values; attend. q, k, v, out: [tokens, WIDTH]."""
    ctx = current()
    model = ctx.layers[layer]
    assert isinstance(model, ToyModel)
    rows = ctx.inputs.rows["keys"]
    model.keys[layer].index_copy_(0, rows.write_slots + 1, k)
    model.values[layer].index_copy_(0, rows.write_slots + 1, v)
    if ctx.shape.q_width == 1:
        _attend_decode(q, model, layer, ctx, out)
    else:
        _attend_ragged(q, k, v, ctx, out)


def _attend_decode(q: Tensor, model: ToyModel, layer: int, ctx: StepContext, out: Tensor) -> None:
    """One query a request; fixed shapes and no host read, so that a request graph can record it."""
    rows = ctx.inputs.rows["keys"]
    offsets = torch.arange(BLOCK_TOKENS, device=q.device)
    slots = (rows.block_table[:, :, None] * BLOCK_TOKENS + offsets).flatten(1) + 1
    keys, values = model.keys[layer][slots], model.values[layer][slots]
    scores = torch.einsum("rw,rsw->rs", q, keys)
    hidden = torch.arange(slots.shape[1], device=q.device) >= rows.lengths[:, None].clamp(min=1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    out.copy_(torch.einsum("rs,rsw->rw", weights, values.masked_fill(hidden[..., None], 0.0)))


def _attend_ragged(q: Tensor, k: Tensor, v: Tensor, ctx: StepContext, out: Tensor) -> None:
    """Requests of any length, by the step's numbers on the host; pad rows are zero."""
    starts = ctx.inputs.query_starts.tolist()
    for begin, end in pairwise(starts):
        at = slice(begin, end)
        future = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu(1)
        scores = (q[at] @ k[at].T).masked_fill(future, float("-inf"))
        out[at] = scores.softmax(-1) @ v[at]
    out[ctx.shape.scheduled_tokens :] = 0.0


@eager_region("toy_experts")
def toy_experts(x: Tensor, gates: Tensor, out: Tensor, layer: int) -> None:
    """Each row through the expert its gate prefers: shapes depend on the numbers. x, out: [tokens, WIDTH]."""
    ctx = current()
    model = ctx.layers[layer]
    assert isinstance(model, ToyModel)
    real = ctx.shape.scheduled_tokens
    chosen = gates[:real].argmax(-1)
    out.zero_()
    for expert in range(EXPERTS):
        rows = torch.nonzero(chosen == expert).flatten()
        out[rows] = x[rows] @ model.experts[expert]


@eager_region("toy_select", outs=("picked",))
def toy_select(scores: Tensor, picked: Tensor, value: int) -> None:
    """Keep the two best columns of each real row. scores, picked: [tokens, WIDTH]."""
    real = current().shape.scheduled_tokens
    picked.zero_()
    best = scores[:real].topk(2, dim=-1).indices
    picked[:real].scatter_(1, best, float(value))


@eager_region("toy_live_note", always_eager=True)
def toy_live_note(x: Tensor, out: Tensor) -> None:
    """Copies x, on the host's clock: never recorded."""
    NOTES.append(current().shape.scheduled_tokens)
    out.copy_(x)


NOTES: list[int] = []
"""Scheduled tokens of every live run of `toy_live_note`."""


class ToyModel:
    """Weights and caches; `regions` is its manifest. What the forward is, subclasses say."""

    regions: Manifest

    def __init__(self, *, layers: int = 3, device: torch.device = CPU, slots: int = 512) -> None:
        generator = torch.Generator().manual_seed(7)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) / WIDTH**0.5).to(device)

        self.layers = layers
        self.embedding = weight(VOCABULARY, WIDTH) * 4
        self.inner = [weight(WIDTH, 3 * WIDTH) for _ in range(layers)]
        self.outer = [weight(WIDTH, WIDTH) for _ in range(layers)]
        self.gates = weight(WIDTH, EXPERTS)
        self.experts = [weight(WIDTH, WIDTH) for _ in range(EXPERTS)]
        # One row more than slots: the first belongs to padding, whose slot is -1.
        self.keys = [torch.zeros(slots + 1, WIDTH, device=device) for _ in range(layers)]
        self.values = [torch.zeros(slots + 1, WIDTH, device=device) for _ in range(layers)]

    def embed(self, step: StepInputs) -> Tensor:
        """Rows [tokens, WIDTH] of ids, told apart by position."""
        return self.embedding[step.token_ids.long()] + step.positions[:, None].float() * 0.01

    def attend(self, x: Tensor, layer: int) -> Tensor:
        """The attention block of a layer, with a handoff buffer of its own."""
        q, k, v = (x @ self.inner[layer]).chunk(3, dim=-1)
        out = torch.empty_like(x)
        toy_attention(q, k, v, out, layer)
        return x + out @ self.outer[layer]

    def forward(self, step: StepInputs) -> Tensor:
        """Hidden states [tokens, WIDTH]."""
        raise NotImplementedError


class DenseToy(ToyModel):
    """Attention and a gated layer."""

    regions = Manifest.of(("toy_attention", 3))

    def forward(self, step: StepInputs) -> Tensor:
        """Hidden states."""
        x = self.embed(step)
        for layer in range(self.layers):
            x = self.attend(torch.nn.functional.layer_norm(x, (WIDTH,)), layer)
            x = x + torch.nn.functional.silu(x @ self.outer[layer])
        return x


class ExpertToy(ToyModel):
    """Attention and experts: two regions a layer."""

    regions = Manifest.of(*["toy_attention", "toy_experts"] * 3)

    def forward(self, step: StepInputs) -> Tensor:
        """Hidden states."""
        x = self.embed(step)
        for layer in range(self.layers):
            x = self.attend(torch.nn.functional.layer_norm(x, (WIDTH,)), layer)
            out = torch.empty_like(x)
            toy_experts(x, x @ self.gates, out, layer)
            x = x + out
        return x


class SparseToy(ToyModel):
    """Reads a derived table in recorded segments; picks columns in a region."""

    regions = Manifest.of(*["toy_select", "toy_attention"] * 3)

    def forward(self, step: StepInputs) -> Tensor:
        """Hidden states."""
        x = self.embed(step)
        for layer in range(self.layers):
            blocks = step.rows["keys"].indptrs()[-1].float()
            x = torch.nn.functional.layer_norm(x, (WIDTH,)) * (1.0 + blocks)
            picked = torch.empty_like(x)
            toy_select(x, picked, 2)
            x = self.attend(x * picked, layer)
        return x


class ToyArena:
    """The fixed buffers of a model's steps; a context over their prefixes."""

    def __init__(
        self,
        model: ToyModel,
        *,
        requests: int = 16,
        tokens: int = 64,
        blocks: int = 4,
        device: torch.device = CPU,
    ) -> None:
        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.model = model
        self.streams = SideStreams(device)
        self._token_ids, self._positions = integers(tokens), integers(tokens)
        self._buffers = PagedBuffers(
            block_table=integers(requests, blocks),
            lengths=integers(requests),
            write_slots=integers(tokens, dtype=torch.int64),
            query_starts=integers(requests + 1),
            block_tokens=BLOCK_TOKENS,
        )

    def prefill(self, prompts: Sequence[Sequence[int]], *, running_tokens: int) -> StepContext:
        """Write a step of whole prompts, padded to a token bucket and to all request rows.

        A recorded segment that reads request rows reads as many in every step.
        """
        tokens = [token for prompt in prompts for token in prompt]
        positions = [at for prompt in prompts for at in range(len(prompt))]
        starts = np.cumsum([0, *map(len, prompts)]).tolist()
        lengths = [len(prompt) for prompt in prompts]
        slots = list(range(len(tokens)))
        return self._write(
            tokens,
            positions,
            slots,
            starts,
            lengths,
            (len(self._buffers.lengths), running_tokens),
            q_width=0,
        )

    def decode(self, tokens: Sequence[int], lengths: Sequence[int], *, running: int) -> StepContext:
        """Write a step of one token a request, `lengths` visible, padded to a request bucket."""
        count = len(tokens)
        first = [self._first_slot(row) for row in range(count)]
        slots = [at + length - 1 for at, length in zip(first, lengths, strict=True)]
        positions = [length - 1 for length in lengths]
        starts = list(range(running + 1))
        return self._write(tokens, positions, slots, starts, lengths, (running, running), q_width=1)

    def _first_slot(self, row: int) -> int:
        return (1 + row * self._buffers.block_table.shape[1]) * BLOCK_TOKENS

    def _write(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        running: tuple[int, int],
        *,
        q_width: int,
    ) -> StepContext:
        requests, running_tokens = running
        to = self._buffers
        _refill(self._token_ids, tokens, 0)
        _refill(self._positions, positions, 0)
        _refill(to.write_slots, slots, -1)
        _refill(to.query_starts, starts, starts[-1])
        _refill(to.lengths, lengths, 0)
        blocks = to.block_table.shape[1]
        for row in range(requests):
            real = row < len(lengths)
            ids = range(1 + row * blocks, 1 + (row + 1) * blocks) if real else [0] * blocks
            _refill(to.block_table[row], list(ids), 0)
        inputs = StepInputs(
            token_ids=self._token_ids[:running_tokens],
            positions=self._positions[:running_tokens],
            query_starts=to.query_starts[: requests + 1],
            logit_rows=torch.arange(len(tokens), dtype=torch.int32),
            rows={"keys": to.view(requests, running_tokens)},
        )
        shape = StepShape(
            mode=Mode.REQUEST_GRAPH if q_width else Mode.TOKEN_GRAPH,
            dummy=False,
            scheduled_requests=len(lengths),
            scheduled_tokens=len(tokens),
            running_requests=requests,
            running_tokens=running_tokens,
            q_width=q_width,
            cut=None,
            uniform_rows=True,
            draft_requests=0,
            why="test",
            wanted=None,
            late=None,
        )
        return StepContext(
            shape=shape,
            inputs=inputs,
            attn=AttnStep(prefill=None, decode=None),
            running_table=np.array([running_tokens], dtype=np.int32),
            layers=[self.model] * self.model.layers,
            streams=self.streams,
            pad_value=0.0,
            late=None,
        )


def _refill(buffer: Tensor, numbers: Sequence[int], pad: int) -> None:
    """Overwrite a whole buffer, so that nothing of an earlier, larger step is left."""
    rest = [pad] * (len(buffer) - len(numbers))
    buffer.copy_(torch.tensor([*numbers, *rest], dtype=buffer.dtype))


def eager(forward: Forward, ctx: StepContext) -> Tensor:
    """The forward of a step, un-recorded; a copy."""
    with installed(ctx):
        begin_forward(ctx)
        return forward(ctx.inputs).clone()


def small_sim() -> GraphBackend:
    """A CPU back end whose pool grows in small chunks, so that tests see it grow."""
    return SimBackend(CPU, chunk_bytes=SMALL_CHUNK_BYTES)


@dataclass(slots=True, kw_only=True)
class Rig:
    """A toy model, its fixed buffers and a graph of it with outlets open."""

    model: ToyModel
    arena: ToyArena
    buffers: StaticBuffers
    tokens: TokenGraph
    requests: ReqGraph


def a_rig(
    kind: type[ToyModel] = DenseToy,
    *,
    buckets: Sequence[int] = (4, 8, 16),
    backend: Callable[[], GraphBackend] = small_sim,
    manifest: Manifest | None = None,
    device: torch.device = CPU,
    pools: Literal["per_graph", "per_bucket"] = "per_graph",
) -> Rig:
    """A model with a token graph and a request graph; nothing is recorded yet."""
    model = kind(device=device)
    arena = ToyArena(model, device=device)
    buffers = StaticBuffers()
    ladder = Ladder(tuple(buckets))
    regions = manifest or model.regions
    made = (
        cls(name, ladder, backend, regions, arena.streams, buffers, pools=pools)
        for cls, name in ((TokenGraph, "toy tokens"), (ReqGraph, "toy requests"))
    )
    tokens, requests = made
    assert isinstance(tokens, TokenGraph)
    assert isinstance(requests, ReqGraph)
    for graph in (tokens, requests):
        graph.open_outlets(torch.empty(1, WIDTH, device=device), buckets[-1])
    return Rig(model=model, arena=arena, buffers=buffers, tokens=tokens, requests=requests)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]


def record_tokens(rig: Rig, bucket: int, forward: Forward | None = None) -> Tensor:
    """Record a token bucket over a full step."""
    ctx = rig.arena.prefill(prompts(bucket), running_tokens=bucket)
    return rig.tokens.record(bucket, forward or rig.model.forward, ctx)
