"""Settled configs for tests, made of the real classes."""

from __future__ import annotations

from pathlib import Path

from tokamak.config.engine import EngineConfig, GraphConfig, ModelFacts
from tokamak.config.options import EngineOptions
from tokamak.config.settle import settle_engine
from tokamak.device.facts import DeviceFacts

GIB = 1024**3

CPU = DeviceFacts(
    vendor="cpu",
    arch="x86_64",
    name="a CPU",
    cores=2,
    memory_bytes=16 * GIB,
    features=frozenset({"avx2", "fma"}),
    libraries=frozenset({"llvmlite"}),
)
"""A CPU with compiled kernels."""

GPU = DeviceFacts(
    vendor="nvidia",
    arch="sm90",
    name="a GPU",
    cores=16,
    memory_bytes=140 * GIB,
    features=frozenset(),
    libraries=frozenset({"triton"}),
    host_bytes=256 * GIB,
)
"""A GPU with kernels of ours."""

SMALL_MODEL = ModelFacts(
    architecture="LlamaForCausalLM",
    vocab_tokens=49152,
    max_position_tokens=8192,
    stored_dtype="Q4_1",
    weight_bytes=98_000_000,
    parameters=134_515_008,
    cache_token_numbers=2 * 30 * 3 * 64,
)


def a_config(
    *,
    facts: DeviceFacts = CPU,
    model: ModelFacts = SMALL_MODEL,
    path: str = "/models/small.gguf",
    **options: object,
) -> EngineConfig:
    """What these options settle to on a device, for a model of 30 layers by default."""
    return settle_engine(EngineOptions(**options), facts, model, Path(path))


def no_graphs() -> GraphConfig:
    """Everything runs eagerly at its scheduled size."""
    return a_config(graphs="off").graphs
