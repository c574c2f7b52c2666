"""Gated activations on any GPU that Triton compiles for: the kernels of `triton_gated.py`, one after the other."""

from __future__ import annotations

from tokamak.ops.activation.limited import silu_mul_limited
from tokamak.ops.activation.reference import silu_mul
from tokamak.ops.activation.triton_gated import TritonActivations
from tokamak.ops.triton_facts import fits

activations = TritonActivations()
triton_silu_mul = silu_mul.backend("triton", fits=fits)(activations.silu_mul)
triton_silu_mul_limited = silu_mul_limited.backend("triton", fits=fits)(
    activations.silu_mul_limited
)
