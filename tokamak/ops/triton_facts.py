"""Where do Triton backends run, and which matrices do their kernels take? Asked without importing Triton."""

from __future__ import annotations

from torch import Tensor

from tokamak.device.facts import DeviceFacts


def fits(facts: DeviceFacts) -> bool:
    """Devices that Triton compiles for, where it is installed."""
    return facts.vendor in ("nvidia", "amd") and facts.has("triton")


def fits_e4m3(facts: DeviceFacts) -> bool:
    """Those of them whose matrix units take 8-bit floating-point numbers."""
    return facts.vendor in ("nvidia", "amd") and facts.multiplies_e4m3


def rows_of(x: Tensor) -> Tensor:
    """The matrix itself where each row lies in one piece, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
