"""Where does the model run, and what is a good size of everything there? A GPU if one can be used, else the CPU.

The only place that says how a CPU's defaults differ from a GPU's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokamak.config.engine import DType, ModelFacts
from tokamak.config.reasons import AUTO
from tokamak.device.facts import DeviceFacts, GpuProbe

Device = Literal["cpu", "cuda"]

BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU extensions that multiply bfloat16."""

SCORE_BYTES = 48
"""Of one vocabulary score while rows are sampled at random: float32 scores, sorted scores with int64 ids, float64
weights and their running sums, and room for one more of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The device the model runs on, and why."""

    facts: DeviceFacts
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDefaults:
    """What is taken on a kind of device where nothing was asked for."""

    max_num_seqs: int
    max_num_seqs_why: str
    step_tokens: int
    block_tokens: int
    memory_fraction: float
    memory_why: str
    arena_bytes: int | None
    """The most that the cache takes without being asked, unless one request needs more; None is all there is."""
    holds_steps: bool
    """Whether memory_fraction also covers what a step computes with: a GPU has nothing else to take it from."""


CPU_DEFAULTS = DeviceDefaults(
    max_num_seqs=32,
    max_num_seqs_why="a CPU gains little from wider decode steps",
    step_tokens=512,
    block_tokens=16,
    memory_fraction=0.5,
    memory_why="other programs need memory too",
    arena_bytes=4 * 1024**3,
    holds_steps=False,
)

GPU_DEFAULTS = DeviceDefaults(
    max_num_seqs=256,
    max_num_seqs_why="decode steps this wide still read each weight once",
    step_tokens=8192,
    block_tokens=16,
    memory_fraction=0.9,
    memory_why="the rest is the driver's, and slack of the allocator",
    arena_bytes=None,
    holds_steps=True,
)


def settle_device(asked: Literal["auto", "cpu", "cuda"], cpu: DeviceFacts, gpu: GpuProbe) -> Chosen:
    """The device: what was asked for, or a GPU where there is one and the kernels for it.

    Raises:
        OptionError: cuda was asked for and no GPU can be used.
    """
    if asked == "cpu":
        return Chosen(facts=cpu, why="asked for")
    if asked == "cuda":
        return Chosen(facts=gpu.needed(), why="asked for")
    if gpu.facts is None:
        return Chosen(facts=cpu, why=f"no NVIDIA GPU: {gpu.why_not}")
    if not gpu.facts.has("triton"):
        return Chosen(
            facts=cpu, why=f"there is a GPU ({gpu.facts.name}), but triton is not installed"
        )
    return Chosen(facts=gpu.facts, why=f"there is a GPU: {gpu.facts.name}")


def device_name(facts: DeviceFacts) -> Device:
    """What PyTorch calls a device of this kind."""
    return "cpu" if facts.vendor == "cpu" else "cuda"


def defaults_of(facts: DeviceFacts) -> DeviceDefaults:
    """What is taken on a device where nothing was asked for."""
    return CPU_DEFAULTS if facts.vendor == "cpu" else GPU_DEFAULTS


def settle_dtype(
    asked: DType | Literal["auto"], facts: DeviceFacts, model: ModelFacts
) -> tuple[DType, str]:
    """The arithmetic of the model, and why."""
    if asked != AUTO:
        return asked, "asked for"
    if facts.vendor != "cpu":
        return "bfloat16", f"{facts.arch} multiplies bfloat16"
    units = sorted(BF16_FEATURES & facts.features)
    if units:
        return "bfloat16", f"this CPU multiplies bfloat16 ({', '.join(units)})"
    return "float32", (
        f"this CPU has no bfloat16 arithmetic; weights are stored as {model.stored_dtype}"
    )


def step_bytes(model: ModelFacts, *, number_bytes: int, step_tokens: int, max_num_seqs: int) -> int:
    """What the largest step computes with at once: rows of its widest layer, and the scores it samples from."""
    rows = step_tokens * model.step_token_numbers * number_bytes
    return rows + max_num_seqs * model.vocab_tokens * SCORE_BYTES
