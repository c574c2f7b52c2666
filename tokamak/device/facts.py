"""What this machine is: vendor, architecture, memory, cores and the optional libraries that import.

Facts hold for the whole run. They are gathered without importing torch, so the front end may ask too. A GPU is
asked through NVML (the package nvidia-ml-py), which needs no CUDA context.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from tokamak.errors import OptionError

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""The variable that tells CUDA which GPUs a process may use; NVML does not look at it."""

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


E4M3_ARCHITECTURES = ("sm89", "sm90", "sm100", "sm103", "sm120", "sm121", "gfx950")
"""GPUs with numbers of E4M3; gfx942 has another kind of the same name."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device, as backends and the settling of options see it."""

    vendor: str
    """`cpu`, `nvidia` or `amd`."""
    arch: str
    """Such as `x86_64`, `sm90` or `gfx950`."""
    name: str
    cores: int
    """CPU cores this process may use, beside a GPU too."""
    memory_bytes: int
    """All memory of the device."""
    features: frozenset[str]
    """Instruction set extensions, of CPU_FEATURES."""
    libraries: frozenset[str]
    """Optional libraries that are installed, of OPTIONAL_LIBRARIES."""
    host_bytes: int = 0
    """Memory of the machine around a GPU that this process may use; a CPU's is `memory_bytes`."""

    def has(self, library: str) -> bool:
        """Whether an optional library is installed."""
        return library in self.libraries

    @property
    def multiplies_e4m3(self) -> bool:
        """Whether its matrix units take 8-bit floating-point numbers as checkpoints store them, and Triton is there."""
        return self.arch in E4M3_ARCHITECTURES and self.has("triton")


@dataclass(frozen=True, slots=True)
class GpuProbe:
    """The GPU this process would use, or why there is none."""

    facts: DeviceFacts | None
    why_not: str = ""

    def needed(self) -> DeviceFacts:
        """The GPU's facts.

        Raises:
            OptionError: there is none.
        """
        if self.facts is None:
            raise OptionError(
                f"device is cuda, but no NVIDIA GPU can be used: {self.why_not}",
                hint="use device=cpu, or leave it out",
            )
        return self.facts


def device_facts(device: str) -> DeviceFacts:
    """Facts of the device a config names, `cpu` or `cuda`.

    Raises:
        OptionError: the device is cuda and no GPU answers.
    """
    return cpu_facts() if device == "cpu" else probe_nvidia().needed()


def nvidia_facts() -> DeviceFacts | None:
    """Facts of the GPU this process would use, or None where none answers."""
    return probe_nvidia().facts


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
        libraries=_libraries(),
    )


@lru_cache(maxsize=1)
def probe_nvidia() -> GpuProbe:
    """The first NVIDIA GPU that CUDA_VISIBLE_DEVICES leaves, or why none can be used."""
    if importlib.util.find_spec("pynvml") is None:
        return GpuProbe(None, "the package nvidia-ml-py is not installed")
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            return _ask_nvml(nvml)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return GpuProbe(None, f"NVML says: {error}")


def _ask_nvml(nvml: Any) -> GpuProbe:
    """Facts from an initialised NVML; raises NVMLError."""
    visible = os.environ.get(VISIBLE_GPUS)
    first = "0" if visible is None else visible.split(",")[0].strip()
    count = nvml.nvmlDeviceGetCount()
    if not count:
        return GpuProbe(None, "NVML finds no GPU")
    if first.startswith("GPU-"):
        gpu = nvml.nvmlDeviceGetHandleByUUID(first)
    elif first.isdigit() and int(first) < count:
        gpu = nvml.nvmlDeviceGetHandleByIndex(int(first))
    else:
        return GpuProbe(None, f"{VISIBLE_GPUS} is {visible!r}, which hides all {count} GPUs")
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(gpu)
    facts = DeviceFacts(
        vendor="nvidia",
        arch=f"sm{major}{minor}",
        name=nvml.nvmlDeviceGetName(gpu),
        cores=available_cores(),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(gpu).total,
        features=frozenset(),
        libraries=_libraries(),
        host_bytes=memory_limit_bytes(),
    )
    return GpuProbe(facts)


def _libraries() -> frozenset[str]:
    return frozenset(
        name for name in OPTIONAL_LIBRARIES if importlib.util.find_spec(name) is not None
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
