# pyright: reportArgumentType=false
"""Which kernels would be launched, and how are they compiled without a device? Launches are noted instead of made.

For a process that compiles ahead and does nothing else: `noted_launches` hands jobs out as it meets them, `Compilers` does
them in processes of their own meanwhile. What they compile lies in Triton's cache on disk afterwards, under the key a
launch will look for.
"""

from __future__ import annotations

import importlib.util
import os
import traceback
from collections.abc import Callable, Iterator
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
def noted_launches(
    target: GPUTarget, multiprocessors: int, start: Callable[[Job], object]
) -> Iterator[None]:
    """Inside, a kernel's launch starts a job that compiles it, unless the like was noted; nothing runs.

    Tensors of the launches may be on the `meta` device, whose addresses count as aligned. Who asks for a GPU's
    properties gets the number of multiprocessors. Triton keeps the driver that has no device.
    """
    seen: set[tuple[int, str]] = set()
    compile_or_run, properties = JITFunction.run, torch.cuda.get_device_properties

    def note(self: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        _, keys, _, _, bind = self.device_caches[0]
        _, specialization, options = bind(*args, **kwargs)
        key = (id(self), compute_cache_key(keys, specialization, options))
        if key not in seen:
            seen.add(key)
            start(partial(compile_or_run, self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(_NoDevice(target))
    JITFunction.run = note
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        multi_processor_count=multiprocessors
    )
    try:
        yield
    finally:
        JITFunction.run = compile_or_run
        torch.cuda.get_device_properties = properties


class Compilers:
    """Does jobs in processes of their own, so many at a time, while the caller goes on noting.

    The caller has no threads and has not touched a device.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._running: set[int] = set()
        self.started = 0
        self.failed = 0
        """Jobs begun, and those of them that ended with an error, which their process has shown."""

    def start(self, job: Job) -> None:
        """Begin a job, when a process is free."""
        if len(self._running) >= self._processes:
            self._await_one()
        self.started += 1
        child = os.fork()
        if not child:
            os._exit(_exit_code(job))
        self._running.add(child)

    def finish(self) -> None:
        """Wait until all jobs are done."""
        while self._running:
            self._await_one()

    def _await_one(self) -> None:
        child, status = os.wait()
        self._running.remove(child)
        self.failed += os.waitstatus_to_exitcode(status) != 0


def _exit_code(job: Job) -> int:
    """Do a job. A kernel that does not compile is the engine's to report."""
    try:
        job()
    except Exception:
        traceback.print_exc()
        return 1
    return 0
