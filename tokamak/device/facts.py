"""What this machine is: vendor, architecture, memory, cores and the optional libraries that import.

Facts hold for the whole run. They are gathered without importing torch, so the front end may ask too.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

OPTIONAL_LIBRARIES = ("llvmlite", "triton", "flashinfer", "xgrammar", "transformers")

CPU_FEATURES = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device, as backends and the settling of options see it."""

    vendor: str
    """`cpu`, `nvidia` or `amd`."""
    arch: str
    """Such as `x86_64`, `sm90` or `gfx950`."""
    name: str
    cores: int
    memory_bytes: int
    """All memory of the device."""
    features: frozenset[str]
    """Instruction set extensions, of CPU_FEATURES."""
    libraries: frozenset[str]
    """Optional libraries that are installed, of OPTIONAL_LIBRARIES."""

    def has(self, library: str) -> bool:
        """Whether an optional library is installed."""
        return library in self.libraries


@lru_cache(maxsize=1)
def cpu_facts() -> DeviceFacts:
    """Facts of the CPU this process may use."""
    model, flags = _cpu_identity()
    return DeviceFacts(
        vendor="cpu",
        arch=platform.machine(),
        name=model,
        cores=available_cores(),
        memory_bytes=memory_limit_bytes(),
        features=frozenset(CPU_FEATURES) & flags,
        libraries=frozenset(
            name for name in OPTIONAL_LIBRARIES if importlib.util.find_spec(name) is not None
        ),
    )


def available_cores() -> int:
    """Cores this process may run on (its affinity mask, where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_limit_bytes() -> int:
    """Memory this process may use: the machine's, or its control group's limit if lower."""
    total = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file():
        text = limit.read_text().strip()
        if text.isdigit():
            return min(total, int(text))
    return total


def _cpu_identity() -> tuple[str, frozenset[str]]:
    """Model name and feature flags from /proc/cpuinfo, or what `platform` knows elsewhere."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return platform.processor() or platform.machine(), frozenset()
    model, flags = platform.machine(), frozenset[str]()
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = frozenset(value.split())
            break
    return model, flags
