"""Gated activations on Hopper: one begins while the product before it ends."""

from __future__ import annotations

from tokamak.ops.activation.limited import silu_mul_limited
from tokamak.ops.activation.reference import silu_mul
from tokamak.ops.activation.triton_gated import TritonActivations
from tokamak.ops.triton_overlap import OVERLAPPED, fits

activations = TritonActivations(OVERLAPPED)
silu_mul.backend("triton_sm90", fits=fits)(activations.silu_mul)
silu_mul_limited.backend("triton_sm90", fits=fits)(activations.silu_mul_limited)
