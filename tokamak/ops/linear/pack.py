"""Which form a weight takes for its matrix products, chosen once when it is loaded."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.core.weight import Weight
from tokamak.device.facts import DeviceFacts


class PackedLinear(Protocol):
    """A weight in its form; a call maps [rows, in] to [rows, out] in the dtype of x."""

    @property
    def form(self) -> str:
        """The name of the form, as `tokamak doctor` shows it."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply rows with the weight."""
        ...


class DenseLinear:
    """The weight as a plain matrix, multiplied by torch: the meaning of every other form."""

    form = "dense"

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]; returns [rows, out]."""
        return functional.linear(x, self.weight)


def pack_linear(
    weight: Weight,
    *,
    dtype: torch.dtype,
    exact: bool,
    facts: DeviceFacts,
    head: bool = False,
    prefer: str | None = None,
) -> PackedLinear:
    """Pack a [out, in] weight for products with rows of `dtype`.

    exact: only forms that compute with the weight as stored, in float32. head: the vocabulary head,
    which keeps at least 8 bits. prefer: a form by name.
    """
    return DenseLinear(weight.dense(dtype))
