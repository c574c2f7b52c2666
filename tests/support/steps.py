"""Steps made by hand: a model with small caches of its own, driven request by request.

Stands in for scheduler, cache and runner where a test is about a model alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokamak.core.inputs import Rows, StepInputs
from tokamak.core.weight import DenseWeight
from tokamak.device.facts import cpu_facts
from tokamak.layers.build import Build
from tokamak.layers.model import Model
from tokamak.models.registry import find


def a_build(
    dtype: torch.dtype = torch.float32,
    *,
    max_model_len: int = 256,
    prefer: Mapping[str, str] | None = None,
) -> Build:
    """A build for this CPU, exact in float32."""
    return Build(
        facts=cpu_facts(),
        device=torch.device("cpu"),
        dtype=dtype,
        exact=dtype == torch.float32,
        max_model_len=max_model_len,
        prefer=prefer or {},
    )


def a_model(
    config: Mapping[str, object], weights: Mapping[str, Tensor], build: Build | None = None
) -> Model:
    """A model of a config with weights put in by name; every parameter once, every weight used."""
    architectures = config["architectures"]
    assert isinstance(architectures, list)
    model = find(architectures[0]).from_config(config, build or a_build())
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


def a_step(
    chunks: Sequence[Chunk],
    *,
    block_tokens: int,
    group: str = "keys",
    prefill_requests: int | None = None,
    padding_tokens: int = 0,
    padding_requests: int = 0,
) -> StepInputs:
    """The inputs of a step over chunks, prefill first; scores are wanted for every row.

    By default chunks of more than one token are prefill, and must come first.
    """
    lengths = [len(chunk.token_ids) for chunk in chunks]
    if prefill_requests is None:
        prefill_requests = sum(length > 1 for length in lengths)
    assert all(length == 1 for length in lengths[prefill_requests:]), f"decode rows after {lengths}"
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    positions = [c.computed + i for c in chunks for i in range(len(c.token_ids))]
    slots = [
        chunk.blocks[at // block_tokens] * block_tokens + at % block_tokens
        for chunk in chunks
        for at in range(chunk.computed, chunk.computed + len(chunk.token_ids))
    ]
    starts = [0]
    for length in lengths + [0] * padding_requests:
        starts.append(starts[-1] + length)
    table = torch.zeros(
        (len(chunks) + padding_requests, max(len(chunk.blocks) for chunk in chunks)),
        dtype=torch.int32,
    )
    for row, chunk in enumerate(chunks):
        table[row, : len(chunk.blocks)] = torch.tensor(chunk.blocks, dtype=torch.int32)
    visible = [c.computed + len(c.token_ids) for c in chunks] + [0] * padding_requests
    return StepInputs(
        token_ids=torch.tensor(tokens + [0] * padding_tokens, dtype=torch.int32),
        positions=torch.tensor(positions + [0] * padding_tokens, dtype=torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        logit_rows=torch.arange(len(tokens)),
        rows={
            group: Rows(
                block_table=table,
                lengths=torch.tensor(visible, dtype=torch.int32),
                write_slots=torch.tensor(slots + [-1] * padding_tokens, dtype=torch.int64),
                block_tokens=block_tokens,
            )
        },
        prefill_requests=prefill_requests,
        prefill_tokens=sum(lengths[:prefill_requests]),
    )


class ModelDriver:
    """Runs steps of a model over named requests, keeping their tokens counted and their blocks apart."""

    def __init__(self, model: Model, *, blocks: int = 64, block_tokens: int = 4) -> None:
        self.model = model
        self.block_tokens = block_tokens
        # Handed out from the highest down, so that no request's blocks lie in order; 0 is nobody's.
        self._free = list(range(1, blocks))
        self._blocks: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        views: dict[str, list[Tensor]] = {}
        for kind in model.sub_caches():
            shape = (blocks, kind.heads, block_tokens, kind.width)
            dtype = getattr(torch, kind.dtype)
            # Not a number, so that reading what was never written shows.
            views[kind.name] = [torch.full(shape, float("nan"), dtype=dtype) for _ in kind.layers]
        model.bind_caches(views)

    def step(
        self,
        work: Mapping[str, Sequence[int]],
        *,
        padding_tokens: int = 0,
        padding_requests: int = 0,
    ) -> dict[str, Tensor]:
        """Run some more tokens of some requests; returns the scores of every row by request."""
        names = sorted(work, key=lambda name: len(work[name]) == 1)
        step = a_step(
            [self._chunk(name, work[name]) for name in names],
            block_tokens=self.block_tokens,
            padding_tokens=padding_tokens,
            padding_requests=padding_requests,
        )
        with torch.inference_mode():
            scores = self.model.logits(self.model.forward(step)[step.logit_rows])
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
        computed = self._computed.get(name, 0)
        blocks = self._blocks.setdefault(name, [])
        self._computed[name] = computed + len(token_ids)
        while len(blocks) * self.block_tokens < self._computed[name]:
            blocks.append(self._free.pop())
        return Chunk(token_ids, computed, list(blocks))
