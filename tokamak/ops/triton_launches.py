# pyright: reportArgumentType=false
"""Which kernels would be launched, and how are they compiled without a device? Launches are noted instead of made.

For a process that compiles ahead and does nothing else: `noted_launches` gives jobs, `compile_all` spreads them over
processes. What they compile lies in Triton's cache on disk afterwards, under the key a launch will look for.
"""

from __future__ import annotations

import importlib.util
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tokamak.device.facts import DeviceFacts

if TYPE_CHECKING or importlib.util.find_spec("triton") is not None:
    # Who compiles ahead imports this module; only where there is a kernel to compile is anything in it called.
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction, compute_cache_key

NUMBER_BYTES = 4
"""Of a job's number in the pipe that hands them out."""

Job = partial[object]


class _NoDevice:
    """A Triton driver that knows what to compile for, and nothing else."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def target_of(facts: DeviceFacts) -> GPUTarget:
    """What Triton compiles for on a device with these facts."""
    if facts.vendor == "nvidia":
        return GPUTarget("cuda", int(facts.arch.removeprefix("sm")), 32)
    assert facts.vendor == "amd", f"Triton does not compile for {facts.vendor}"
    return GPUTarget("hip", facts.arch, 64)


@contextmanager
def noted_launches(target: GPUTarget, multiprocessors: int) -> Iterator[list[Job]]:
    """Inside, a kernel's launch adds a job that compiles it, unless the like was noted; nothing runs.

    Tensors of the launches may be on the `meta` device, whose addresses count as aligned. Who asks for a GPU's
    properties gets the number of multiprocessors. Triton keeps the driver that has no device.
    """
    jobs: list[Job] = []
    seen: set[tuple[int, str]] = set()
    compile_or_run, properties = JITFunction.run, torch.cuda.get_device_properties

    def note(self: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        _, keys, _, _, bind = self.device_caches[0]
        _, specialization, options = bind(*args, **kwargs)
        key = (id(self), compute_cache_key(keys, specialization, options))
        if key not in seen:
            seen.add(key)
            jobs.append(partial(compile_or_run, self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(_NoDevice(target))
    JITFunction.run = note
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        multi_processor_count=multiprocessors
    )
    try:
        yield jobs
    finally:
        JITFunction.run = compile_or_run
        torch.cuda.get_device_properties = properties


def compile_all(jobs: Sequence[Job], processes: int) -> list[int]:
    """Do the jobs in so many processes, each taking the next when it is done; returns their exit codes.

    The caller has no threads and has not touched a device.
    """
    take, give = os.pipe()
    for number in range(len(jobs)):
        os.write(give, number.to_bytes(NUMBER_BYTES, "little"))
    os.close(give)
    children: list[int] = []
    for _ in range(min(processes, len(jobs))):
        child = os.fork()
        if not child:
            os._exit(_work(jobs, take))
        children.append(child)
    os.close(take)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _work(jobs: Sequence[Job], take: int) -> int:
    """Do what is left of the jobs; the exit code. A kernel that does not compile is the engine's to report."""
    failed = 0
    while number := os.read(take, NUMBER_BYTES):
        try:
            jobs[int.from_bytes(number, "little")]()
        except Exception:
            traceback.print_exc()
            failed = 1
    return failed
