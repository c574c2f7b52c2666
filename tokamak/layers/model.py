"""What a model family declares and computes; the runner knows every model by this class alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tokamak.cache.sub_cache import SubCache
from tokamak.core.inputs import StepInputs
from tokamak.core.plan import StepPlan
from tokamak.core.weight import Weight
from tokamak.graphs.region import Manifest
from tokamak.layers.stages import Stages
from tokamak.text.tokenizer import Tokenizer


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

    def draw(self, generator: torch.Generator) -> list[Weight]:
        """Random parts of a trained model's scale, for `load`."""
        ...


class Model(nn.Module, ABC):
    """A decoder: declares its caches and weights, computes hidden states and logits."""

    architectures: ClassVar[tuple[str, ...]]

    token_graph: ClassVar[str] = "supported"
    """`supported`, or why steps with prefill rows cannot be recorded."""

    cache_dtypes: ClassVar[tuple[str, ...]] = ()
    """Formats that its keys and values may have beside the model's own; `kv_cache_dtype` asks for one."""

    needs_status: ClassVar[bool] = False
    """Whether metadata needs the previous step's accepted counts on the host, which is worth a wait there."""

    layers: Sequence[object] = ()
    """What `Build.enroll` numbered: where the bodies of eager regions find their layer."""

    @abstractmethod
    def sub_caches(self) -> tuple[SubCache, ...]:
        """What it keeps per request between steps."""

    def take_names(self, names: Collection[str]) -> None:
        """Told the names of a checkpoint's tensors before `weights` is asked, where a family has several spellings."""
        del names

    def take_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Told the tokenizer the weights belong to, before the first forward; None where they are random.

        Raises:
            CheckpointError: it is not the one a family with tables by text was trained with.
        """
        del tokenizer

    @abstractmethod
    def weights(self) -> Mapping[str, tuple[Parameter, tuple[str, ...]]]:
        """Every parameter by its own name: where it lives, and the checkpoint tensors it is made of."""

    @abstractmethod
    def optional_weights(self) -> frozenset[str]:
        """Checkpoint tensors that may be there and are not needed, such as a copy of a tied head."""

    @abstractmethod
    def regions(self) -> Manifest:
        """The eager regions a forward meets, in order."""

    def stages(self) -> Stages | None:
        """The forward in two parts, where late layers need not run for all rows of a prompt; else None."""
        return None

    def step_demands_eager(self, plan: StepPlan) -> int:
        """Bits of `Demand` for what in a plan this model cannot record, such as image rows; 0 for nothing."""
        del plan
        return 0

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
