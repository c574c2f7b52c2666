"""Products of few rows on any GPU that Triton compiles for: the kernels of `triton_few.py`, one after the other."""

from __future__ import annotations

from tokamak.ops.linear.few_rows import (
    few_rows_after_norm,
    few_rows_gated,
    few_rows_into,
    few_rows_linear,
)
from tokamak.ops.linear.triton_few import FewRows
from tokamak.ops.triton_facts import fits

few_rows = FewRows()
few_rows_linear.backend("triton", fits=fits)(few_rows.linear)
few_rows_after_norm.backend("triton", fits=fits)(few_rows.after_norm)
few_rows_gated.backend("triton", fits=fits)(few_rows.gated)
few_rows_into.backend("triton", fits=fits)(few_rows.into)
