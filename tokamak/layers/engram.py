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
from tokamak.layers.plain import Product, around_one
from tokamak.layers.rows import fill_padding
from tokamak.layers.table import Table
from tokamak.ops.engram import engram_gate, engram_rows

SEED_STEP = 10007
"""Between the seeds of the multipliers of two layers."""


@eager_region("engram_fetch", outs=("rows", "values"))
def engram_fetch_region(rows: Tensor, values: Tensor, layer: int) -> None:
    """Begin to fetch what a memory has of each token's n-grams; `engram_join` waits for it.

    rows: int64 [tokens, columns]; values: [tokens, columns * head_dim] in the model's dtype. Both are the side stream's
    until then.
    """
    context = current()
    _memory(context, layer).find(rows, values, context)


@eager_region("engram_join", outs=("values",))
def engram_join_region(values: Tensor, layer: int) -> None:
    """Let what reads `values` from now on wait for the fetch into them."""
    del values
    context = current()
    context.streams.join(_memory(context, layer).stream)


def _memory(context: StepContext, layer: int) -> Engram:
    engram = context.layers[layer]
    assert isinstance(engram, Engram), f"layer {layer} is {engram!r}"
    return engram


class Engram:
    """One layer's table with its hashes, and the gates of its streams.

    Which rows a step needs depends on its tokens alone: they are fetched beside the layers in front of this one, on a
    side stream that is forked where the forward begins and joined here.
    """

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
        self.weights = Product(build, (streams, width), draw=around_one)
        self._primes = torch.tensor(primes, dtype=torch.int64, device=build.device)
        self._multipliers = torch.tensor(multipliers, dtype=torch.int64, device=build.device)
        self._columns, self._head_dim = columns, head_dim
        self._streams, self._width, self._eps = streams, width, eps
        self._dtype, self._device = build.dtype, build.device
        self._compressed_ids: Tensor | None = None
        self._pad_id = 0
        self._rows = build.bind(engram_rows, live=True)
        self._gate = build.bind(engram_gate)
        self._number = build.enroll(self)
        self.stream = f"engram {self._number}"
        """The side stream's name."""
        self._fetched: tuple[Tensor, Tensor] | None = None

    def take_ids(self, compressed_ids: Tensor, pad_id: int) -> None:
        """The compressed id of every token id, int64 [vocab] on the model's device, and the one before a text."""
        self._compressed_ids, self._pad_id = compressed_ids, pad_id

    def fetch(self, tokens: int) -> None:
        """Begin to fetch for a forward's tokens, before its first layer; `__call__` of the same forward takes it."""
        rows = torch.empty((tokens, self._columns), dtype=torch.int64, device=self._device)
        shape = (tokens, self._columns * self._head_dim)
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        engram_fetch_region(rows, values, self._number)
        # Rows are kept as long as the side stream may read them: a recording would give their memory away.
        self._fetched = rows, values

    def __call__(self, streams: Tensor) -> Tensor:
        """Let the memory into the streams: [tokens, streams, width], a new tensor."""
        assert self._fetched is not None, "an n-gram memory whose rows nobody fetched"
        rows, found = self._fetched
        engram_join_region(found, self._number)
        self._fetched = None
        del rows
        keys, values = self.key_value(found).split(
            [self._streams * self._width, self._width], dim=-1
        )
        return self._gate(streams, keys, values, self.weights.values, self._eps)

    def find(self, rows: Tensor, values: Tensor, context: StepContext) -> None:
        """The body of the fetch; rows of padding ask for row 0."""
        inputs, ids = context.inputs, self._compressed_ids
        assert ids is not None, "an n-gram memory was called before it knew the vocabulary"
        assert inputs.history is not None, "a step without token history"
        assert inputs.slots is not None, "a step without slots"
        with context.streams.fork(self.stream):
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
                    rows[half.tokens],
                )
            fill_padding(context, 0, rows)
            self.table.read(rows.view(-1), values.view(-1, self._head_dim))


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
