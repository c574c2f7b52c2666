"""How does a Triton kernel follow the one before it? By itself, unless a chip knows better.

START and READY of a kernel are what it may do when a program begins, and before it reads what kernels before
it wrote. The other keys say how it is launched.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from triton.runtime import driver


@triton.jit
def nothing() -> None:
    """The stream starts a kernel when the one before is done."""


@triton.jit
def ask_nothing(row_ptrs, BYTES: tl.constexpr):
    """Weights are asked for when they are loaded."""


IN_ORDER: Mapping[str, object] = {"START": nothing, "READY": nothing}


@lru_cache
def order_on(device_type: str) -> Mapping[str, object]:
    """How kernels are launched on a kind of device that wait for the one before as soon as they begin.

    On Hopper they begin while that one ends; on others, and interpreted on a CPU, in order.
    """
    if device_type == "cpu" or not _is_hopper():
        return IN_ORDER
    return importlib.import_module("tokamak.ops.triton_overlap").OVERLAPPED


@lru_cache
def asking_on(device_type: str) -> Mapping[str, object]:
    """The same for kernels that ask the second cache for weights, which nothing writes, before they wait."""
    order = order_on(device_type)
    if order is IN_ORDER:
        return {**order, "ASK": ask_nothing}
    return {**order, "ASK": importlib.import_module("tokamak.ops.triton_overlap").ask}


def _is_hopper() -> bool:
    """Whether Triton compiles for it, with a device or without."""
    target: Any = driver.active.get_current_target()
    return (target.backend, target.arch) == ("cuda", 90)
