"""The residual stream on any GPU that Triton compiles for: the kernels of `triton_norms.py`, one after the other."""

from __future__ import annotations

from tokamak.ops.norm.reference import add_residual, add_rms_norm, rms_norm
from tokamak.ops.norm.triton_norms import TritonNorms, add_rows
from tokamak.ops.triton_facts import fits

norms = TritonNorms()
triton_rms_norm = rms_norm.backend("triton", fits=fits)(norms.rms_norm)
triton_add_rms_norm = add_rms_norm.backend("triton", fits=fits)(norms.add_rms_norm)
triton_add_residual = add_residual.backend("triton", fits=fits)(add_rows)
