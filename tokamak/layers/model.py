"""What a model family declares and computes; the runner knows every model by this class alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tokamak.cache.sub_cache import SubCache
from tokamak.core.inputs import StepInputs
from tokamak.core.weight import Weight


@runtime_checkable
class Parameter(Protocol):
    """A place in a model where weights go: a layer that takes one or several checkpoint tensors."""

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each checkpoint tensor it is made from, in order."""
        ...

    def load(self, parts: Sequence[Weight]) -> None:
        """Take the weights (stacked by rows), convert, pack and place them."""
        ...

    def load_random(self, generator: torch.Generator) -> None:
        """Fill with seeded random numbers of a trained model's scale."""
        ...


class Model(nn.Module, ABC):
    """A decoder: declares its caches and weights, computes hidden states and logits."""

    architectures: ClassVar[tuple[str, ...]]

    @abstractmethod
    def sub_caches(self) -> tuple[SubCache, ...]:
        """What it keeps per request between steps."""

    @abstractmethod
    def weights(self) -> Mapping[str, tuple[Parameter, tuple[str, ...]]]:
        """Every parameter by its own name: where it lives, and the checkpoint tensors it is made of."""

    @abstractmethod
    def optional_weights(self) -> frozenset[str]:
        """Checkpoint tensors that may be there and are not needed, such as a copy of a tied head."""

    @abstractmethod
    def bind_caches(self, views: Mapping[str, Sequence[Tensor]]) -> None:
        """Take the arena's views: by sub-cache name, one [blocks, heads, block_tokens, width] a layer."""

    @abstractmethod
    def forward(self, step: StepInputs) -> Tensor:
        """The residual stream after the last layer, before the final norm: [tokens, width]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary scores of some hidden rows, final norm included: [rows, width] to [rows, vocab].

        float32 whatever the model's dtype.
        """
