"""The residual stream in LLVM: a row a work item, two passes over it for a norm, float32 sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tokamak.ops.jit.available import fits
from tokamak.ops.jit.compiler import KernelSource, Library, float_bits, threads_for
from tokamak.ops.jit.language import Kernel
from tokamak.ops.jit.torch_kinds import KINDS, fresh, rows_of
from tokamak.ops.jit.values import Num, Pointer
from tokamak.ops.norm.reference import add_residual, add_rms_norm, rms_norm

X, X_STRIDE, RESIDUAL, WEIGHT, OUT, ROWS, WIDTH, EPS = range(8)
PARAMETERS = 8
GRAIN_NUMBERS = 8192
"""Numbers a thread should have to itself before another one is woken."""


def root_scale(kernel: Kernel, row: Pointer, width: Num, eps: Num) -> Num:
    """1 / sqrt(mean of squares + eps) of a row."""
    vector = kernel.var(kernel.zeros())
    single = kernel.var(kernel.float(0.0))

    def square(at: Num, lanes: int) -> None:
        number = row[at].load(lanes)
        total = vector if lanes > 1 else single
        total.set(kernel.fma(number, number, total.now))

    kernel.sweep(width, square)
    total = kernel.sum_lanes(vector.now) + single.now
    return kernel.float(1.0) / kernel.call("llvm.sqrt", total / width.to_float() + eps)


def _kernel(kind: str, *, adds: bool) -> Callable[[Kernel], None]:
    def write(kernel: Kernel) -> None:
        width, eps = kernel.integer(WIDTH), kernel.real(EPS)
        x, stride = kernel.pointer(X, kind), kernel.integer(X_STRIDE)
        weight, out = kernel.pointer(WEIGHT, kind), kernel.pointer(OUT, kind)
        with kernel.items(kernel.integer(ROWS)) as row:
            source = x[row * stride]
            if adds:
                added = kernel.pointer(RESIDUAL, kind)[row * width]

                def add(at: Num, lanes: int, x: Pointer = source, to: Pointer = added) -> None:
                    to[at].store(to[at].load(lanes) + x[at].load(lanes))

                kernel.sweep(width, add)
                source = added
            scale = root_scale(kernel, source, width, eps)
            target = out[row * width]

            def norm(at: Num, lanes: int, x: Pointer = source) -> None:
                factor = scale if lanes == 1 else kernel.spread(scale)
                unit = kernel.as_kind(x[at].load(lanes) * factor, kind)
                target[at].store(unit * weight[at].load(lanes))

            kernel.sweep(width, norm)

    return write


def _add(kind: str) -> Callable[[Kernel], None]:
    def write(kernel: Kernel) -> None:
        width, stride = kernel.integer(WIDTH), kernel.integer(X_STRIDE)
        x, residual = kernel.pointer(X, kind), kernel.pointer(RESIDUAL, kind)
        with kernel.items(kernel.integer(ROWS)) as row:
            source, target = x[row * stride], residual[row * width]

            def add(at: Num, lanes: int) -> None:
                target[at].store(target[at].load(lanes) + source[at].load(lanes))

            kernel.sweep(width, add)

    return write


@lru_cache
def kernel_for(op: str, dtype: torch.dtype) -> Callable[..., None]:
    """The compiled call of an op for a dtype."""
    kind = KINDS[dtype]
    name = f"{op}_{kind}"
    body = _add(kind) if op == "add_residual" else _kernel(kind, adds=op == "add_rms_norm")
    source = KernelSource(name, PARAMETERS, body)
    return Library(name, [Path(__file__)], [source]).function(name)


@rms_norm.backend("llvm", fits=fits)
def llvm_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by weight."""
    if x.dtype not in KINDS or weight.dtype != x.dtype:
        return rms_norm.reference(x, weight, eps)
    x = rows_of(x)
    rows, width = x.shape
    out = fresh((rows, width), x.dtype)
    kernel_for("rms_norm", x.dtype)(
        threads_for(rows * width, GRAIN_NUMBERS),
        x.data_ptr(),
        x.stride(0),
        0,
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        float_bits(eps),
    )
    return out


@add_rms_norm.backend("llvm", fits=fits)
def llvm_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to the residual stream in place, then norm the sum."""
    if (
        x.dtype not in KINDS
        or not weight.dtype == residual.dtype == x.dtype
        or not residual.is_contiguous()
    ):
        return add_rms_norm.reference(x, residual, weight, eps)
    x = rows_of(x)
    rows, width = x.shape
    out = fresh((rows, width), x.dtype)
    kernel_for("add_rms_norm", x.dtype)(
        threads_for(rows * width, GRAIN_NUMBERS),
        x.data_ptr(),
        x.stride(0),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        float_bits(eps),
    )
    return out


@add_residual.backend("llvm", fits=fits)
def llvm_add_residual(x: Tensor, residual: Tensor) -> Tensor:
    """Add x to the residual stream in place, and return the stream."""
    if x.dtype not in KINDS or residual.dtype != x.dtype or not residual.is_contiguous():
        return add_residual.reference(x, residual)
    x = rows_of(x)
    rows, width = x.shape
    kernel_for("add_residual", x.dtype)(
        threads_for(rows * width, GRAIN_NUMBERS),
        x.data_ptr(), x.stride(0), residual.data_ptr(), 0, 0, rows, width, 0,
    )  # fmt: skip
    return residual
