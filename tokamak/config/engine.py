"""What was decided: frozen values that never say "auto".

Made once by `config/settle.py` from options, device facts and model facts; read by everyone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["float32", "bfloat16"]
CacheDType = Literal["float32", "bfloat16", "fp8", "native"]
"""Number formats of keys and values. fp8 is E4M3 without a scale: numbers beyond 448 become that. native are the packed
formats that a model was trained to keep its rows in, each kind of row in its own.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the front end and the settling of options must know of a checkpoint; no tensor is read."""

    architecture: str
    vocab_tokens: int
    max_position_tokens: int
    stored_dtype: str
    """The number format most weights have, such as `Q4_1` or `bfloat16`."""
    weight_bytes: int
    """Bytes of the weights as stored."""
    parameters: int
    scaled_parameters: int = 0
    """Those of them that are stored in 8- or 4-bit floating-point numbers with scales."""
    packed_parameters: int = 0
    """Those of the latter that have 4 bits."""
    table_parameters: int = 0
    """Those of `parameters` in tables of n-grams, which keep their number format; `scaled_parameters` has none of them."""
    table_bytes: int = 0
    """What these take as they are stored, or would be where there are no tensors."""
    cache_token_numbers: int = 0
    """Numbers a token adds to the caches of all layers; 0 where the checkpoint does not tell."""
    step_token_numbers: int = 0
    """Numbers a token's row takes at once in the widest part of a layer; 0 where the checkpoint does not tell."""
    block_multiple: int = 1
    """What the tokens of a cache block must be divisible by: some rows stand for several tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is held."""

    path: str
    """A folder with config.json, or a .gguf file."""
    served_names: tuple[str, ...]
    """Names clients may use; the first is the one we report."""
    load_format: Literal["auto", "random"]
    seed: int
    dtype: DType
    """The number format of activations."""
    exact: bool
    """Whether weights must keep every bit the file has: `dtype=float32` was asked for by name."""
    device: str
    max_model_len: int
    shortens: bool
    """Whether max_model_len was our choice: a start whose recordings leave less room shortens it."""
    bounded_replay: bool
    """Whether late layers run for a window's rows of each prompt alone, an approximation."""
    chat_template: str | None
    """A path to a template that replaces the model's own."""
    weight_bytes: int
    """What the weights take at most on the device, as they are held there; see `settle_cache.held_weight_bytes`."""
    tables: Literal["device", "host"]
    """Where tables of n-grams lie; a model without has them on the device."""
    host_bytes: int
    """What tables take that lie on the host beside the weights: pinned for a GPU, for a CPU pages of the mapped file."""
    facts: ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How much is kept between steps."""

    block_tokens: int
    dtype: CacheDType
    """The number format of keys and values."""
    arena_bytes: int
    """Bytes for all blocks; the block count follows from the model's rows."""
    blocks: int | None
    """A block count that overrides arena_bytes, or None."""
    room_bytes: int | None
    """What the cache and recordings may take together; None where the cache's size was asked for."""
    prefix_caching: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How many requests and tokens a step and the queue may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: Literal["fcfs", "priority"]
    max_waiting_requests: int
    max_waiting_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """How ops are chosen on the device."""

    threads: int
    prefer: tuple[tuple[str, str], ...]
    """Pairs of op name and backend name that override the choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """What is recorded, when, and how it is checked."""

    when: Literal["startup", "serving", "on-demand", "off"]
    backend: Literal["cuda", "sim", "none"]
    """`none` exactly when `when` is off."""
    request_sizes: tuple[int, ...] | None
    """Request buckets; None is the default rule, empty is off."""
    token_sizes: tuple[int, ...] | None
    """Token buckets; None is the default rule, empty is off."""
    token_max: int
    """The top of the default token ladder."""
    eager_pad: bool
    """Run token buckets eagerly at their size with the same padding: a fault of padding or of recording?"""
    pools: Literal["per_graph", "per_bucket"]
    allow_missing_bucket: bool
    """Whether a bucket that fails to record (for a reason other than memory) is left out by all ranks."""
    verify: bool
    """Compare every bucket with the eager forward before serving."""
    verify_rate: float
    """The share of replayed steps that are compared with the eager forward while serving."""
    poison_pads: bool
    """Fill what pad rows read with NaN in eager steps, so that a row which reads them shows."""

    @property
    def records_all(self) -> bool:
        """Whether every bucket is recorded, asked for or not: before serving, or from then on."""
        return self.when in ("startup", "serving")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the HTTP server listens and what it accepts."""

    host: str
    port: int
    uds: str | None
    api_keys: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    max_body_bytes: int
    drain_timeout_s: float
    log_level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a field got its value: a line of `tokamak doctor`."""

    field: str
    value: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    kernels: KernelConfig
    graphs: GraphConfig
    reasons: tuple[Reason, ...]
