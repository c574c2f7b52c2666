"""Steps made by hand: a model with small caches of its own, driven request by request.

Stands in for scheduler, cache and runner where a test is about a model alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokamak.cache.groups import group_sub_caches
from tokamak.cache.view import PagedBuffers
from tokamak.core.context import StepContext, installed
from tokamak.core.inputs import StepInputs
from tokamak.core.plan import Grants, Mode, StepPlan, StepShape
from tokamak.core.weight import DenseWeight
from tokamak.device.facts import cpu_facts
from tokamak.graphs.streams import SideStreams
from tokamak.layers.attention.prepare import AttnBuilder
from tokamak.layers.build import Build
from tokamak.layers.model import Model
from tokamak.models.registry import find


def a_build(
    dtype: torch.dtype = torch.float32,
    *,
    max_model_len: int = 256,
    prefer: Mapping[str, str] | None = None,
    cache_dtype: str = "",
    bounded_replay: bool = False,
) -> Build:
    """A build for this CPU, exact in float32."""
    return Build(
        facts=cpu_facts(),
        device=torch.device("cpu"),
        dtype=dtype,
        exact=dtype == torch.float32,
        max_model_len=max_model_len,
        prefer=prefer or {},
        cache_dtype=cache_dtype,
        bounded_replay=bounded_replay,
    )


def a_model(
    config: Mapping[str, object], weights: Mapping[str, Tensor], build: Build | None = None
) -> Model:
    """A model of a config with weights put in by name; every parameter once, every weight used."""
    architectures = config["architectures"]
    assert isinstance(architectures, list)
    model = find(architectures[0]).from_config(config, build or a_build())
    model.take_names(weights)
    left = set(weights) - model.optional_weights()
    for parameter, sources in model.weights().values():
        parameter.load([DenseWeight(weights[name]) for name in sources])
        left -= set(sources)
    assert not left, f"weights nobody took: {sorted(left)}"
    return model


@dataclass(slots=True)
class Chunk:
    """Some tokens of one request to run in a step, after `computed` cached ones, in its blocks."""

    token_ids: Sequence[int]
    computed: int
    blocks: Sequence[int]
    before: Sequence[int] = ()
    """The computed tokens, where a model looks at them."""


def a_context(
    chunks: Sequence[Chunk],
    *,
    block_tokens: int,
    groups: Sequence[str] = ("keys",),
    padding: int = 0,
    layers: Sequence[object] = (),
) -> StepContext:
    """A forward over chunks, prefill first, decode rows of one token last; scores are wanted for every row.

    Chunks of more than one token are prefill and must come first. `padding` token rows follow a step with
    prefill rows; in a step of decode rows alone they are requests of one token.
    """
    lens = [len(chunk.token_ids) for chunk in chunks]
    prefill_rows = sum(length > 1 for length in lens)
    assert all(length == 1 for length in lens[prefill_rows:]), f"decode rows after {lens}"
    plan = _plan(chunks, prefill_rows)
    requests = len(chunks) + (0 if prefill_rows else padding)
    tokens = sum(lens) + padding
    shape = StepShape(
        mode=Mode.EAGER,
        dummy=False,
        scheduled_requests=len(chunks),
        scheduled_tokens=sum(lens),
        running_requests=requests,
        running_tokens=tokens,
        q_width=0 if prefill_rows else 1,
        cut=None,
        uniform_rows=True,
        draft_requests=0,
        why="test",
        wanted=None,
        late=None,
    )
    inputs = _inputs(chunks, requests, tokens, block_tokens, groups)
    inputs.q_width = shape.q_width
    widest = 1 + max(chunk.computed + len(chunk.token_ids) for chunk in chunks)
    builder = AttnBuilder(
        torch.device("cpu"), max_requests=requests, max_model_len=widest, widths=(1,)
    )
    return StepContext(
        shape=shape,
        inputs=inputs,
        attn=builder.prepare(plan, shape, inputs, None),
        running_table=np.array([tokens], dtype=np.int32),
        layers=layers,
        streams=SideStreams(torch.device("cpu")),
        pad_value=0.0,
        late=None,
    )


def _plan(chunks: Sequence[Chunk], prefill_rows: int) -> StepPlan:
    final = np.zeros(len(chunks), dtype=np.bool_)
    final[:prefill_rows] = True
    return StepPlan(
        seq=0,
        request_ids=tuple(str(at) for at in range(len(chunks))),
        slots=np.arange(1, len(chunks) + 1, dtype=np.int32),
        query_lens=np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int32),
        computed_before=np.array([chunk.computed for chunk in chunks], dtype=np.int32),
        prefill_rows=prefill_rows,
        final_chunk=final,
        admissions=(),
        grants=Grants.none(),
    )


def _inputs(
    chunks: Sequence[Chunk],
    requests: int,
    running_tokens: int,
    block_tokens: int,
    groups: Sequence[str],
) -> StepInputs:
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    positions = [c.computed + i for c in chunks for i in range(len(c.token_ids))]
    slots = [
        chunk.blocks[at // block_tokens] * block_tokens + at % block_tokens
        for chunk in chunks
        for at in range(chunk.computed, chunk.computed + len(chunk.token_ids))
    ]
    lens = [len(chunk.token_ids) for chunk in chunks] + [1] * (requests - len(chunks))
    table = torch.zeros((requests, max(len(chunk.blocks) for chunk in chunks)), dtype=torch.int32)
    for row, chunk in enumerate(chunks):
        table[row, : len(chunk.blocks)] = torch.tensor(chunk.blocks, dtype=torch.int32)
    visible = [c.computed + len(c.token_ids) for c in chunks] + [1] * (requests - len(chunks))
    pads = running_tokens - len(tokens)
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int()
    buffers = PagedBuffers(
        block_table=table,
        lengths=torch.tensor(visible, dtype=torch.int32),
        write_slots=torch.tensor(slots + [-1] * pads, dtype=torch.int64),
        query_starts=starts,
        block_tokens=block_tokens,
    )
    known = [[*chunk.before, *chunk.token_ids] for chunk in chunks]
    history = torch.zeros((len(chunks) + 1, max(map(len, known)) + 1), dtype=torch.int32)
    for slot, ids in enumerate(known, start=1):
        history[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    slots = [*range(1, len(chunks) + 1), *[0] * (requests - len(chunks))]
    return StepInputs(
        token_ids=torch.tensor(tokens + [0] * pads, dtype=torch.int32),
        positions=torch.tensor(positions + [0] * pads, dtype=torch.int32),
        query_starts=starts,
        logit_rows=torch.arange(len(tokens), dtype=torch.int32),
        rows={group: buffers.view(requests, running_tokens) for group in groups},
        history=history,
        slots=torch.tensor(slots, dtype=torch.int32),
    )


class ModelDriver:
    """Runs steps of a model over named requests, keeping their tokens counted and their blocks apart."""

    def __init__(self, model: Model, *, blocks: int = 64, block_tokens: int = 4) -> None:
        self.model = model
        self.block_tokens = block_tokens
        # Handed out from the highest down, so that no request's blocks lie in order; 0 is nobody's.
        self._free = list(range(1, blocks))
        self._blocks: dict[str, list[int]] = {}
        self._known: dict[str, list[int]] = {}
        self._groups = [group.name for group in group_sub_caches(model.sub_caches())]
        views: dict[str, list[Tensor]] = {}
        for kind in model.sub_caches():
            shape = (blocks, kind.heads, block_tokens // kind.stride_tokens, kind.width)
            dtype = getattr(torch, kind.dtype)
            # Not a number, so that reading what was never written shows; in records, bytes of ones say so.
            unwritten = 255 if dtype == torch.uint8 else float("nan")
            views[kind.name] = [torch.full(shape, unwritten, dtype=dtype) for _ in kind.layers]
        model.bind_caches(views)

    def step(
        self,
        work: Mapping[str, Sequence[int]],
        *,
        padding: int = 0,
    ) -> dict[str, Tensor]:
        """Run some more tokens of some requests; returns the scores of every row by request."""
        names = sorted(work, key=lambda name: len(work[name]) == 1)
        context = a_context(
            [self._chunk(name, work[name]) for name in names],
            block_tokens=self.block_tokens,
            groups=self._groups,
            padding=padding,
            layers=self.model.layers,
        )
        with torch.inference_mode(), installed(context):
            hidden = self.model.forward(context.inputs)
            scores = self.model.logits(hidden[context.inputs.logit_rows])
        parts = scores.split([len(work[name]) for name in names])
        return dict(zip(names, parts, strict=True))

    def greedy(self, name: str, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Prefill a prompt in one step, then decode the most likely tokens, ignoring any stop."""
        token = int(self.step({name: prompt_ids})[name][-1].argmax())
        output_ids = [token]
        while len(output_ids) < max_tokens:
            token = int(self.step({name: [token]})[name][-1].argmax())
            output_ids.append(token)
        return output_ids

    def _chunk(self, name: str, token_ids: Sequence[int]) -> Chunk:
        known = self._known.setdefault(name, [])
        before = list(known)
        blocks = self._blocks.setdefault(name, [])
        known.extend(token_ids)
        while len(blocks) * self.block_tokens < len(known):
            blocks.append(self._free.pop())
        return Chunk(token_ids, len(before), list(blocks), before)
