"""On which machines can compiled kernels run? Asked without importing the compiler."""

from __future__ import annotations

from tokamak.device.facts import DeviceFacts

VECTOR_FEATURES = frozenset({"avx2", "avx512f", "asimd"})


def fits(facts: DeviceFacts) -> bool:
    """CPUs on which llvmlite is installed and whose vectors kernels are written for."""
    return (
        facts.vendor == "cpu" and facts.has("llvmlite") and bool(VECTOR_FEATURES & facts.features)
    )
