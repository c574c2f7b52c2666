"""Norms on Hopper: a norm begins while the product before it ends, and its weight is there when that is done."""

from __future__ import annotations

from tokamak.ops.norm.reference import add_rms_norm, rms_norm
from tokamak.ops.norm.triton_norms import TritonNorms
from tokamak.ops.triton_overlap import OVERLAPPED, fits

norms = TritonNorms(OVERLAPPED)
rms_norm.backend("triton_sm90", fits=fits)(norms.rms_norm)
add_rms_norm.backend("triton_sm90", fits=fits)(norms.add_rms_norm)
