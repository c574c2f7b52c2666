"""The n-gram memory in front of a layer: which rows of its table a text asks for, and how they enter the streams."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokamak.core.context import StepContext, current
from tokamak.graphs.region import eager_region
from tokamak.layers.build import Build
from tokamak.layers.linear import Linear
from tokamak.layers.plain import Plain, around_one
from tokamak.layers.table import Table
from tokamak.ops.engram import engram_gate, engram_rows

SEED_STEP = 10007
"""Between the seeds of the multipliers of two layers."""


@eager_region("engram_rows", outs=("out",))
def engram_rows_region(out: Tensor, layer: int) -> None:
    """Find the rows of each token's n-grams. out: int64 [tokens, columns]."""
    context = current()
    engram = context.layers[layer]
    assert isinstance(engram, Engram), f"layer {layer} is {engram!r}"
    engram.find(out, context)


class Engram:
    """One layer's table with its hashes, and the gates of its streams."""

    def __init__(
        self,
        build: Build,
        *,
        streams: int,
        width: int,
        head_dim: int,
        primes: Sequence[Sequence[int]],
        multipliers: Sequence[int],
        eps: float,
    ) -> None:
        columns = sum(map(len, primes))
        rows = sum(map(sum, primes))
        self.table = Table(build, rows, head_dim)
        self.key_value = Linear(build, columns * head_dim, ((streams + 1) * width,))
        self.q_weight = Plain(build, (streams, width), draw=around_one)
        self.k_weight = Plain(build, (streams, width), draw=around_one)
        self._primes = torch.tensor(primes, dtype=torch.int64, device=build.device)
        self._multipliers = torch.tensor(multipliers, dtype=torch.int64, device=build.device)
        self._columns, self._streams, self._width, self._eps = columns, streams, width, eps
        self._compressed_ids: Tensor | None = None
        self._pad_id = 0
        self._rows = build.bind(engram_rows, live=True)
        self._gate = build.bind(engram_gate)
        self._number = build.enroll(self)

    def take_ids(self, compressed_ids: Tensor, pad_id: int) -> None:
        """The compressed id of every token id, int64 [vocab] on the model's device, and the one before a text."""
        self._compressed_ids, self._pad_id = compressed_ids, pad_id

    def __call__(self, streams: Tensor) -> Tensor:
        """Let the memory into the streams: [tokens, streams, width], a new tensor."""
        rows = torch.empty(
            (streams.shape[0], self._columns), dtype=torch.int64, device=streams.device
        )
        engram_rows_region(rows, self._number)
        found = self.table(rows.view(-1)).view(streams.shape[0], -1)
        keys, values = self.key_value(found).split(
            [self._streams * self._width, self._width], dim=-1
        )
        weight = self.q_weight.values * self.k_weight.values
        return self._gate(streams, keys, values, weight, self._eps)

    def find(self, out: Tensor, context: StepContext) -> None:
        """The body of the region; rows of padding ask for row 0."""
        inputs, ids = context.inputs, self._compressed_ids
        assert ids is not None, "an n-gram memory was called before it knew the vocabulary"
        assert inputs.history is not None, "a step without token history"
        assert inputs.slots is not None, "a step without slots"
        for half in context.attn.halves:
            self._rows(
                inputs.history,
                inputs.slots[half.requests],
                inputs.positions[half.tokens],
                half.query_starts,
                half.q_width,
                ids,
                self._pad_id,
                self._multipliers,
                self._primes,
                out[half.tokens],
            )
        out[context.attn.tokens :].fill_(0)


def hash_primes(
    start: int, layers: Sequence[int], orders: int, heads: int
) -> dict[int, tuple[tuple[int, ...], ...]]:
    """By layer and order: the sizes of the parts of its table.

    For every layer and order the search begins anew below `start` and takes the next primes nobody has.
    """
    taken: set[int] = set()
    found: dict[int, tuple[tuple[int, ...], ...]] = {}
    for layer in layers:
        by_order: list[tuple[int, ...]] = []
        for _ in range(orders):
            primes: list[int] = []
            at = start
            while len(primes) < heads:
                if at not in taken and _is_prime(at):
                    primes.append(at)
                at += 1
            taken.update(primes)
            by_order.append(tuple(primes))
        found[layer] = tuple(by_order)
    return found


def hash_multipliers(layer: int, compressed_tokens: int, count: int) -> tuple[int, ...]:
    """Odd numbers of a layer, so small that the product with any compressed id fits 63 bits."""
    bound = max(1, ((2**63 - 1) // compressed_tokens) // 2)
    drawn = np.random.default_rng(SEED_STEP * layer).integers(0, bound, size=count, dtype=np.int64)
    return tuple(int(number) * 2 + 1 for number in drawn)


def _is_prime(number: int) -> bool:
    if number < 2:
        return False
    return all(number % divisor for divisor in range(2, int(number**0.5) + 1))
