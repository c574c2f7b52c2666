"""Which forms can a weight take? Those of PyTorch are here: plain, prepacked by oneDNN, 4-bit codes.

A form makes a callable [rows, in] -> [rows, out] of a weight. Further forms register themselves when
their module is imported, as op backends do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.core.weight import GROUP_COLUMNS, GroupedWeight, Weight
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


@dataclass(frozen=True, slots=True)
class Form:
    """A form a weight may take."""

    name: str
    make: Callable[[Weight, torch.dtype], PackedLinear]
    """Packs a weight for rows of a dtype."""
    accepts: Callable[[Weight, torch.dtype, DeviceFacts], bool]
    rounds: Literal["nothing", "rows", "weights"] = "nothing"
    """What it rounds beyond the weight as stored and the rows' own dtype."""
    replaces: str = ""
    """A form that need not be measured where this one fits, as this one is faster everywhere."""


FORMS: list[Form] = []
"""Every form, the most trusted first."""


class DenseLinear:
    """The weight as a plain matrix, multiplied by torch: the meaning of every other form."""

    form = "dense"

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]; returns [rows, out]."""
        return functional.linear(x, self.weight)


class OneDnnLinear:
    """The weight in the blocked layout oneDNN computes with, laid out once instead of every call."""

    form = "onednn"

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
        self._multiply = torch.ops.mkldnn._linear_pointwise

    @staticmethod
    def accepts(weight: Weight, dtype: torch.dtype, facts: DeviceFacts) -> bool:
        """Whether this PyTorch has the two internal ops, and this CPU the dtype's arithmetic."""
        del weight
        if facts.vendor != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        ops = torch.ops.mkldnn
        if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
            return False
        return dtype == torch.float32 or (
            dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported()
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]; returns [rows, out]."""
        return self._multiply(x, self._packed, None, "none", [], "")


class Int4Linear:
    """PyTorch's own 4-bit product: bfloat16 rows and scales, so the weight is rounded a little."""

    form = "int4pack"

    def __init__(self, weight: Weight) -> None:
        assert isinstance(weight, GroupedWeight)
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self._codes = pack(weight.codes.int(), 1)
        middle = weight.minimums + 8 * weight.scales
        pairs = torch.stack([weight.scales.T, middle.T], dim=-1)
        self._scales = pairs.bfloat16().contiguous()
        self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu

    @staticmethod
    def accepts(weight: Weight, dtype: torch.dtype, facts: DeviceFacts) -> bool:
        """Whether this PyTorch has the op and the weight its shape."""
        aten = torch.ops.aten
        return (
            facts.vendor == "cpu"
            and dtype == torch.bfloat16
            and isinstance(weight, GroupedWeight)
            and weight.bits == 4
            and weight.shape[0] % 64 == 0
            and hasattr(aten, "_convert_weight_to_int4pack_for_cpu")
            and hasattr(aten, "_weight_int4pack_mm_for_cpu")
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in] bfloat16; returns [rows, out]."""
        return self._multiply(x, self._codes, GROUP_COLUMNS, self._scales)


class ByRows:
    """Two forms of one weight: one for few rows, the other for many."""

    def __init__(self, few: PackedLinear, many: PackedLinear, border_rows: int) -> None:
        self._few, self._many, self._border_rows = few, many, border_rows
        self.form = f"{few.form} to {border_rows} rows, {many.form} above"

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in]; returns [rows, out]."""
        return self._few(x) if x.shape[0] <= self._border_rows else self._many(x)


FORMS += [
    Form(
        "onednn",
        lambda weight, dtype: OneDnnLinear(weight.dense(dtype)),
        OneDnnLinear.accepts,
    ),
    Form(
        "int4pack", lambda weight, dtype: Int4Linear(weight), Int4Linear.accepts, rounds="weights"
    ),
    Form("dense", lambda weight, dtype: DenseLinear(weight.dense(dtype)), lambda *_: True),
]
