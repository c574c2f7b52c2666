"""Import the backend modules whose libraries are here; after that every op knows what it can choose from."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from operator import itemgetter

from tokamak.ops import (
    activation,
    compress,
    embedding,
    engram,
    grouped_linear,
    indexer,
    linear,
    moe_experts,
    moe_route,
    norm,
    paged_attention,
    quant_linear,
    quantize,
    records,
    residual_mix,
    rope,
    rotate_cache_attend,
    rotate_write,
    sample,
    sparse_attention,
    step_prep,
    walk_plan,
)

OP_PACKAGES = (
    activation,
    compress,
    embedding,
    engram,
    grouped_linear,
    indexer,
    linear,
    moe_experts,
    moe_route,
    norm,
    paged_attention,
    quant_linear,
    quantize,
    records,
    residual_mix,
    rope,
    rotate_cache_attend,
    rotate_write,
    sample,
    sparse_attention,
    step_prep,
    walk_plan,
)
"""Packages whose import registers their ops."""

BACKEND_MODULES = {
    "llvmlite": (
        "tokamak.ops.activation.llvm",
        "tokamak.ops.embedding.llvm",
        "tokamak.ops.linear.llvm",
        "tokamak.ops.linear.llvm_int16",
        "tokamak.ops.norm.llvm",
        "tokamak.ops.paged_attention.llvm",
        "tokamak.ops.rope.llvm",
        "tokamak.ops.sample.llvm",
    ),
    "triton": (
        "tokamak.ops.activation.triton_sm90",
        "tokamak.ops.activation.triton",
        "tokamak.ops.compress.triton",
        "tokamak.ops.embedding.triton",
        "tokamak.ops.engram.triton",
        "tokamak.ops.grouped_linear.triton",
        "tokamak.ops.indexer.triton",
        "tokamak.ops.linear.triton_sm90",
        "tokamak.ops.linear.triton",
        "tokamak.ops.moe_experts.triton",
        "tokamak.ops.moe_experts.triton_limited",
        "tokamak.ops.moe_route.triton",
        "tokamak.ops.moe_route.triton_rooted",
        "tokamak.ops.norm.triton_sm90",
        "tokamak.ops.norm.triton",
        "tokamak.ops.paged_attention.triton_sm90",
        "tokamak.ops.paged_attention.triton",
        "tokamak.ops.quant_linear.triton",
        "tokamak.ops.quantize.triton",
        "tokamak.ops.quantize.triton_rows",
        "tokamak.ops.records.triton",
        "tokamak.ops.residual_mix.triton",
        "tokamak.ops.residual_mix.triton_coefficients",
        "tokamak.ops.rope.triton",
        "tokamak.ops.rope.triton_pairs",
        "tokamak.ops.rotate_cache_attend.triton_sm90",
        "tokamak.ops.rotate_cache_attend.triton",
        "tokamak.ops.rotate_write.triton",
        "tokamak.ops.sample.triton",
        "tokamak.ops.sample.triton_draw",
        "tokamak.ops.sparse_attention.triton",
        "tokamak.ops.step_prep.triton",
        "tokamak.ops.walk_plan.triton",
    ),
    "torch": ("tokamak.ops.paged_attention.padded_backend",),
}
"""Modules that register backends, by the library they need; earlier ones are preferred."""


def load_backends() -> None:
    """Register every backend this machine can import. Absence of a library is never an error."""
    for library, modules in BACKEND_MODULES.items():
        if importlib.util.find_spec(library) is not None:
            for module in modules:
                importlib.import_module(module)
    if importlib.util.find_spec("triton") is not None:
        _key_kernels()


def _key_kernels() -> None:
    """Give Triton's kernels the keys of its cache in one order.

    A key counts what functions read that the kernel calls, but only of those that have keys already. A process that
    launched kernels in another order would not find what this one compiled.
    """
    kind = importlib.import_module("triton.runtime.jit").JITFunction
    for module in sorted(name for name in sys.modules if name.startswith("tokamak.ops.")):
        for _, each in sorted(vars(sys.modules[module]).items(), key=itemgetter(0)):
            if isinstance(each, kind):
                _ = each.cache_key
