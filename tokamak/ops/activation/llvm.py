"""Gated activations in LLVM: rows shared between threads, one pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tokamak.ops.activation.reference import silu_mul
from tokamak.ops.jit.available import fits
from tokamak.ops.jit.compiler import KernelSource, Library, threads_for
from tokamak.ops.jit.language import Kernel
from tokamak.ops.jit.torch_kinds import KINDS, fresh, rows_of
from tokamak.ops.jit.values import Num

GATE_UP, STRIDE, OUT, ROWS, WIDTH = range(5)
PARAMETERS = 5
GRAIN_NUMBERS = 4096


def _kernel(kind: str) -> Callable[[Kernel], None]:
    def write(kernel: Kernel) -> None:
        width, stride = kernel.integer(WIDTH), kernel.integer(STRIDE)
        gates, out = kernel.pointer(GATE_UP, kind), kernel.pointer(OUT, kind)
        with kernel.items(kernel.integer(ROWS)) as row:
            gate = gates[row * stride]
            up, target = gate[width], out[row * width]

            def multiply(at: Num, lanes: int) -> None:
                number = gate[at].load(lanes)
                silu = number / (kernel.exp(0.0 - number) + 1.0)
                target[at].store(kernel.as_kind(silu, kind) * up[at].load(lanes))

            kernel.sweep(width, multiply)

    return write


@lru_cache
def kernel_for(dtype: torch.dtype) -> Callable[..., None]:
    """The compiled call for a dtype."""
    name = f"silu_mul_{KINDS[dtype]}"
    source = KernelSource(name, PARAMETERS, _kernel(KINDS[dtype]))
    return Library(name, [Path(__file__)], [source]).function(name)


@silu_mul.backend("llvm", fits=fits)
def llvm_silu_mul(gate_up: Tensor) -> Tensor:
    """Multiply silu(gate) with up."""
    if gate_up.dtype not in KINDS or gate_up.dim() != 2:
        return silu_mul.reference(gate_up)
    gate_up = rows_of(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = fresh((rows, width), gate_up.dtype)
    kernel_for(gate_up.dtype)(
        threads_for(rows * width, GRAIN_NUMBERS),
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        rows,
        width,
    )
    return out
