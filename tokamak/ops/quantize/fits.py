"""Which devices have numbers of E4M3, as checkpoints store them? Asked without importing Triton."""

from __future__ import annotations

from tokamak.device.facts import DeviceFacts
from tokamak.ops import triton_facts

ARCHITECTURES = ("sm89", "sm90", "sm100", "sm103", "sm120", "sm121", "gfx950")
"""Others have none, or, as gfx942, another kind with the same name."""


def fits(facts: DeviceFacts) -> bool:
    """Devices whose matrix units take E4M3, where Triton is installed."""
    return triton_facts.fits(facts) and facts.arch in ARCHITECTURES
