"""How does a weight multiply on a GPU? Few rows by kernels that take their neighbours along, many by torch.

In: rows of the residual stream, or of what was computed from it. Out: products, or a changed stream.
A decoder layer calls `after_norm` and `into` in turn. Few rows never leave a sum behind; of many rows the
product is `pending` until the next norm adds it, as that norm passes over the stream anyway.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.core.minifloat import UE8M0, factors_of
from tokamak.core.weight import ScaledWeight, Weight
from tokamak.device.facts import DeviceFacts
from tokamak.ops.activation import silu_mul
from tokamak.ops.linear.few_rows import (
    few_rows_after_norm,
    few_rows_gated,
    few_rows_into,
    few_rows_linear,
    product,
)
from tokamak.ops.linear.tile import fused_rows, normed_rows
from tokamak.ops.norm import add_rms_norm, rms_norm
from tokamak.ops.quant_linear import ScaleBlocks, group_of, library, scaled_linear
from tokamak.ops.registry import REFERENCE, Choice


class FusedLinear(ABC):
    """A [features, columns] weight on the device, and what a decoder layer does right before and after its products.

    What is not overridden runs as calls of their own.
    """

    form: str
    """How the weight is held."""

    def __init__(self, facts: DeviceFacts) -> None:
        self._rms_norm, norm = rms_norm.bind(facts)
        self._add_rms_norm, add_norm = add_rms_norm.bind(facts)
        self._silu_mul, activation = silu_mul.bind(facts)
        self.choices: tuple[Choice, ...] = (norm, add_norm, activation)
        """The backends its products and their neighbours run on."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, columns]; returns [rows, features] in the dtype of x."""

    @abstractmethod
    def scores(self, x: Tensor) -> Tensor:
        """x: [rows, columns]; returns [rows, features] float32, never rounded to the dtype of x."""

    def after_norm(
        self, x: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> Tensor:
        """Add what is pending to the residual stream in place, norm the stream and multiply it.

        x: [rows, columns] pending, or None; residual: [rows, columns]; norm_weight: [columns]; returns
        [rows, features] in the dtype of the stream.
        """
        return self(self._normed(x, residual, norm_weight, eps))

    def scores_after_norm(self, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        """Norm rows of a stream and score them.

        residual: [rows, columns]; norm_weight: [columns]; returns [rows, features] float32.
        """
        return self.scores(self._rms_norm(residual, norm_weight, eps))

    def gated_after_norm(
        self, x: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> Tensor:
        """Like `after_norm` for a weight of gate and up, then silu(gate) * up.

        The weight is [2 * inner, columns], the rows of gate first; returns [rows, inner].
        """
        return self._silu_mul(self(self._normed(x, residual, norm_weight, eps)))

    def into(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """Multiply rows and add them to the residual stream in place, or return them for the next norm to add.

        x: [rows, columns]; residual: [rows, features]; returns None, or [rows, features] pending.
        """
        del residual
        return self(x)

    def _normed(
        self, x: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> Tensor:
        if x is None:
            return self._rms_norm(residual, norm_weight, eps)
        return self._add_rms_norm(x, residual, norm_weight, eps)


class DeviceLinear(FusedLinear):
    """A plain weight: few rows meet it in kernels that take its neighbours along."""

    form = "device"

    def __init__(self, weight: Tensor, facts: DeviceFacts) -> None:
        super().__init__(facts)
        assert weight.dim() == 2, f"a weight of shape {tuple(weight.shape)} is no matrix"
        self.weight = weight.contiguous()
        features, columns = weight.shape
        self.fused_rows = fused_rows(features, columns)
        """The most rows that kernels for few rows get; more are the library's."""
        self.gated_rows = fused_rows(features, columns, gated=True)
        """The same for a weight of gate and up."""
        self.normed_rows = normed_rows(features, columns)
        self.gated_normed_rows = normed_rows(features, columns, gated=True)
        """The most rows that these kernels norm themselves."""
        self._few_linear, linear = few_rows_linear.bind(facts)
        self._few_after_norm, after_norm = few_rows_after_norm.bind(facts)
        self._few_gated, gated = few_rows_gated.bind(facts)
        self._few_into, into = few_rows_into.bind(facts)
        self.choices = (linear, after_norm, gated, into, *self.choices)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, columns], in the weight's dtype or a narrower one; returns [rows, features] in the weight's dtype."""
        if x.shape[0] <= self.fused_rows:
            return self._few_linear(x, self.weight, self.weight.dtype)
        return functional.linear(x.to(self.weight.dtype), self.weight)

    def scores(self, x: Tensor) -> Tensor:
        """x: [rows, columns]; returns [rows, features] float32, never rounded to the dtype of x."""
        if x.shape[0] <= self.fused_rows:
            return self._few_linear(x, self.weight, torch.float32)
        return product(x, self.weight, torch.float32)

    def after_norm(
        self, x: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> Tensor:
        """Add what is pending to the residual stream in place, norm the stream and multiply it."""
        if x is None and residual.shape[0] <= self.normed_rows:
            return self._few_after_norm(residual, norm_weight, eps, self.weight, residual.dtype)
        return super().after_norm(x, residual, norm_weight, eps)

    def scores_after_norm(self, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        """Norm rows of a stream and score them."""
        if residual.shape[0] <= self.normed_rows:
            return self._few_after_norm(residual, norm_weight, eps, self.weight, torch.float32)
        return super().scores_after_norm(residual, norm_weight, eps)

    def gated_after_norm(
        self, x: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> Tensor:
        """Like `after_norm` for a weight of gate and up, then silu(gate) * up."""
        if x is None and residual.shape[0] <= self.gated_normed_rows:
            return self._few_gated(residual, norm_weight, eps, self.weight)
        normed = self._normed(x, residual, norm_weight, eps)
        if residual.shape[0] <= self.gated_rows:
            return self._few_gated(normed, None, eps, self.weight)
        return self._silu_mul(functional.linear(normed, self.weight))

    def into(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """Multiply rows and add them to the residual stream in place, or return them for the next norm to add."""
        if x.shape[0] <= self.fused_rows:
            self._few_into(x, self.weight, residual)
            return None
        return super().into(x, residual)


class ScaledLinear(FusedLinear):
    """An 8-bit weight: rows are rounded to 8 bits before they meet it, see `scaled_linear`."""

    form = "fp8"

    def __init__(self, weight: ScaledWeight, facts: DeviceFacts) -> None:
        super().__init__(facts)
        self._codes, self._scales = weight.codes.contiguous(), factors_of(weight.scales)
        self._blocks = ScaleBlocks(*weight.block, weight.scales.dtype == UE8M0)
        self._scaled_linear, choice = scaled_linear.bind(facts)
        if library.suits(self._blocks, self._codes.shape[1]):
            # Asked before anything is recorded, as the first answer waits for the device.
            library.agrees(self._codes.device)
        self.choices = (choice, *self.choices)

    @staticmethod
    def takes(weight: ScaledWeight, dtype: torch.dtype, facts: DeviceFacts) -> bool:
        """Whether this device multiplies such a weight with rows of `dtype` faster than a widened one."""
        fast = scaled_linear.bind(facts)[1].backend != REFERENCE
        return fast and dtype.itemsize == 2 and ScaledLinear.can_take(weight)

    @staticmethod
    def can_take(weight: ScaledWeight) -> bool:
        """Whether a weight's blocks suit groups of columns."""
        return group_of(ScaleBlocks(*weight.block), weight.shape[1]) is not None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, columns]; returns [rows, features] in the dtype of x."""
        return self._scaled_linear(x, self._codes, self._scales, self._blocks, x.dtype)

    def scores(self, x: Tensor) -> Tensor:
        """x: [rows, columns]; returns [rows, features] float32, never rounded to the dtype of x."""
        return self._scaled_linear(x, self._codes, self._scales, self._blocks, torch.float32)


def to_device(weight: Weight, *, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """The weight as a plain matrix of `dtype` on a device, or where it is; codes are widened before they travel."""
    matrix = weight.dense(dtype)
    return matrix if device is None else matrix.to(device)


def scaled_to_device(weight: ScaledWeight, device: torch.device | None) -> ScaledWeight:
    """The weight on a device, or where it is, in the 8 bits it has."""
    if device is None:
        return weight
    return ScaledWeight(weight.codes.to(device), weight.scales.to(device), weight.block)
