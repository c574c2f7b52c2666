"""Which GPU would this process use, as NVML and CUDA_VISIBLE_DEVICES say, or why is there none?"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from tokamak.device.facts import (
    DeviceFacts,
    cpu_facts,
    device_facts,
    nvidia_facts,
    probe_nvidia,
)
from tokamak.errors import OptionError

GIB = 1024**3


class NVMLError(Exception):
    pass


class Nvml(ModuleType):
    """NVML over GPUs of these names; `broken` is what its start says."""

    NVMLError = NVMLError

    def __init__(self, *names: str, broken: str = "") -> None:
        super().__init__("pynvml")
        self.__spec__ = ModuleSpec("pynvml", None)
        self.names = names
        self.broken = broken
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise NVMLError(self.broken)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return self.names[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        name = uuid.removeprefix("GPU-")
        if name not in self.names:
            raise NVMLError(f"not found: {uuid}")
        return name

    def nvmlDeviceGetName(self, gpu: str) -> str:  # noqa: N802
        return gpu

    def nvmlDeviceGetCudaComputeCapability(self, gpu: str) -> tuple[int, int]:  # noqa: N802
        return (9, 0)

    def nvmlDeviceGetMemoryInfo(self, gpu: str) -> object:  # noqa: N802
        class Memory:
            total = 140 * GIB

        return Memory()


@pytest.fixture
def nvml(monkeypatch):
    """Puts an NVML in place of the machine's own."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    probe_nvidia.cache_clear()

    def put(*names: str, broken: str = "") -> Nvml:
        module = Nvml(*names, broken=broken)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    yield put
    probe_nvidia.cache_clear()


def test_a_gpu_is_described_as_backends_see_it(nvml):
    module = nvml("first", "second")

    facts = nvidia_facts()

    assert facts is not None
    assert (facts.vendor, facts.arch, facts.name) == ("nvidia", "sm90", "first")
    assert facts.memory_bytes == 140 * GIB
    assert (facts.cores, facts.libraries) == (cpu_facts().cores, cpu_facts().libraries)
    assert not module.open


@pytest.mark.parametrize(("visible", "name"), [("1", "second"), ("1,0", "second"), ("GPU-first", "first")])  # fmt: skip
def test_the_gpu_is_the_first_that_cuda_sees(nvml, monkeypatch, visible, name):
    nvml("first", "second")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    facts = nvidia_facts()

    assert facts is not None
    assert facts.name == name


@pytest.mark.parametrize(
    ("names", "broken", "visible", "why"),
    [
        ((), "", None, "NVML finds no GPU"),
        (("first",), "Driver Not Loaded", None, "NVML says: Driver Not Loaded"),
        (("first",), "", "", "CUDA_VISIBLE_DEVICES is '', which hides all 1 GPUs"),
        (("first",), "", "-1", "CUDA_VISIBLE_DEVICES is '-1', which hides all 1 GPUs"),
        (("first",), "", "1", "CUDA_VISIBLE_DEVICES is '1', which hides all 1 GPUs"),
        (("first",), "", "GPU-other", "NVML says: not found: GPU-other"),
    ],
    ids=str,
)
def test_a_gpu_that_cannot_be_used_is_none_with_a_reason(
    nvml, monkeypatch, names, broken, visible, why
):
    module = nvml(*names, broken=broken)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert nvidia_facts() is None
    assert probe_nvidia().why_not == why
    assert not module.open


def test_without_the_package_there_is_no_gpu(nvml, monkeypatch):
    nvml("first")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    probe = probe_nvidia()

    assert (probe.facts, probe.why_not) == (None, "the package nvidia-ml-py is not installed")


def test_a_device_a_config_names_has_facts_or_an_error_that_says_why(nvml):
    nvml(broken="Driver Not Loaded")

    with pytest.raises(OptionError, match=r"device is cuda.*Driver Not Loaded.*use device=cpu"):
        device_facts("cuda")

    assert device_facts("cpu") is cpu_facts()
    assert isinstance(device_facts("cpu"), DeviceFacts)
