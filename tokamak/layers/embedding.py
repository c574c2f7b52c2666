"""Token ids to vectors and vectors to vocabulary scores, from one table or from two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamak.core.weight import DenseWeight, Weight
from tokamak.layers.build import Build
from tokamak.layers.linear import random_matrix
from tokamak.layers.norm import RMSNorm
from tokamak.ops.embedding import embed
from tokamak.ops.linear import PackedLinear
from tokamak.ops.linear.device import FusedLinear


class Head:
    """The vocabulary head: a matrix product that keeps at least 8 bits per weight."""

    def __init__(self, build: Build, vocab_tokens: int, width: int) -> None:
        self._build = build
        self._shape = (vocab_tokens, width)
        self._packed: PackedLinear | None = None

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """[vocab, width], once."""
        return (self._shape,)

    @property
    def form(self) -> str:
        """The form its weight was packed in."""
        return "unloaded" if self._packed is None else self._packed.form

    def load(self, parts: Sequence[Weight]) -> None:
        """Pack the one part."""
        (weight,) = parts
        assert weight.shape == self._shape, f"a head of {weight.shape} for {self._shape}"
        self._packed = self._build.pack(weight, head=True)

    def draw(self, generator: torch.Generator) -> list[Weight]:
        """A random part that gives scores of normed rows unit scale."""
        return [random_matrix(self._shape, generator)]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, width]; returns scores [rows, vocab], float32."""
        assert self._packed is not None, "the vocabulary head was called before it was loaded"
        if isinstance(self._packed, FusedLinear):
            return self._packed.scores(x)
        return self._packed(x).float()

    def after_norm(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """Norm rows of the residual stream [rows, width] and score them; returns [rows, vocab], float32."""
        if isinstance(self._packed, FusedLinear):
            return self._packed.scores_after_norm(hidden, norm.weight.values, norm.eps)
        return self(norm(hidden))


class Embedding:
    """The table of token vectors; `head` is given when the same weight is the vocabulary head."""

    def __init__(self, build: Build, vocab_tokens: int, width: int, *, head: Head | None) -> None:
        self._build = build
        self._shape = (vocab_tokens, width)
        self._head = head
        self._embed = build.bind(embed)
        self._table: Tensor | None = None

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """[vocab, width], once."""
        return (self._shape,)

    def load(self, parts: Sequence[Weight]) -> None:
        """Keep the table as plain numbers, and hand the weight to a tied head.

        A dense weight is handed on as the table itself, so that a head that stays dense shares it;
        a weight stored in few bits is handed on as stored, and packs without loss.
        """
        (weight,) = parts
        assert weight.shape == self._shape, f"an embedding of {weight.shape} for {self._shape}"
        build = self._build
        table = weight.dense(build.dtype).to(build.device).contiguous()
        self._table = table
        if self._head is not None:
            shared = build.exact or isinstance(weight, DenseWeight)
            self._head.load([DenseWeight(table) if shared else weight])

    def draw(self, generator: torch.Generator) -> list[Weight]:
        """A random part that gives a tied head's scores unit scale."""
        return [random_matrix(self._shape, generator)]

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids: [tokens] int32; returns their vectors, a new [tokens, width] tensor."""
        assert self._table is not None, "the embedding was called before it was loaded"
        return self._embed(token_ids, self._table)
