"""How does a kernel become a call? Its instructions are written, compiled once per machine, and shared by threads."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from llvmlite import ir

from tokamak.ops.jit.language import Kernel
from tokamak.ops.jit.objects import host, load_object
from tokamak.ops.jit.threads import pool

logger = logging.getLogger(__name__)

Body = Callable[[Kernel], None]
"""A function that writes a kernel's instructions."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel: its name, how many arguments it takes, and the function that writes it."""

    name: str
    parameters: int
    body: Body


class Library:
    """Some kernels compiled together; `function(name)` is a call that runs one on several threads."""

    def __init__(self, name: str, sources: Sequence[Path], kernels: Sequence[KernelSource]) -> None:
        self._parameters = {kernel.name: kernel.parameters for kernel in kernels}
        self._engine = load_object(name, sources, lambda: _assembly(kernels))

    def function(self, name: str) -> Callable[..., None]:
        """The kernel as a call: `call(threads, *integers)`; floats are passed through `float_bits`."""
        address = self._engine.get_function_address(name)
        return pool().call(address, self._parameters[name], self._engine)


def float_bits(number: float) -> int:
    """A float32 as the integer argument that `Kernel.real` reads."""
    return struct.unpack("<I", struct.pack("<f", number))[0]


def threads_for(work: int, grain: int) -> int:
    """Threads worth waking for an amount of work when `grain` of it outweighs the waking."""
    return 1 if work < 2 * grain else min(torch.get_num_threads(), work // grain)


def _assembly(kernels: Sequence[KernelSource]) -> str:
    """The kernels' instructions, as LLVM assembly."""
    module = ir.Module("kernels")
    for kernel in kernels:
        worker = Kernel(module, kernel.name, kernel.parameters, host().lanes)
        kernel.body(worker)
        worker.finish()
    return str(module)
