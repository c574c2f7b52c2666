"""Gated activations on any GPU that Triton compiles for: the kernels of `triton_gated.py`, one after the other."""

from __future__ import annotations

from tokamak.ops.activation.reference import silu_mul
from tokamak.ops.activation.triton_gated import TritonActivations
from tokamak.ops.triton_facts import fits

triton_silu_mul = silu_mul.backend("triton", fits=fits)(TritonActivations().silu_mul)
