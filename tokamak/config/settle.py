"""What is decided: options, device facts and model facts become a config, with a reason for each choice.

The only place where "auto" is answered and where combinations are refused. No torch, no tensor, no
clock: the same answers on every rank and in every test. What needs the built model (how many blocks the
cache's bytes make) is checked by `check_pool`, which the runner calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokamak.config.engine import (
    EngineConfig,
    KernelConfig,
    ModelConfig,
    ModelFacts,
    SchedulerConfig,
    ServerConfig,
)
from tokamak.config.options import EngineOptions, ServeOptions
from tokamak.config.reasons import AUTO, Reasons, size
from tokamak.config.settle_cache import cache_block_bytes, held_weight_bytes, settle_cache
from tokamak.config.settle_device import defaults_of, device_name, settle_dtype
from tokamak.config.settle_graphs import settle_graphs
from tokamak.device.facts import DeviceFacts
from tokamak.errors import OptionError

QUEUED_STEPS = 1024
"""How many full steps of prompt tokens may wait by default."""


def settle_engine(
    options: EngineOptions,
    facts: DeviceFacts,
    model: ModelFacts,
    path: Path,
    *,
    device_why: str = "the device given",
) -> EngineConfig:
    """Decide everything an engine is built from.

    Args:
        options: what was asked.
        facts: the device the model will run on, as `settle_device` chose it.
        model: what the checkpoint at `path` says of itself.
        path: a folder with config.json, or a .gguf file.
        device_why: why it runs there.

    Raises:
        OptionError: a setting, or two together, cannot be met; the message names them and what works.
    """
    reasons = Reasons()
    device = reasons.note("device", device_name(facts), device_why)
    assert options.device in (AUTO, device), f"{options.device} was asked for, {device} is given"
    dtype, why = settle_dtype(options.dtype, facts, model)
    reasons.note("dtype", dtype, why)
    if options.bounded_replay:
        reasons.note("bounded_replay", "true", "asked for; near to all layers behind long prompts")
    scheduler = _settle_scheduler(options, facts, model, reasons)
    # `kernels` may ask for another form of every weight than the one it is stored in.
    keeps_8_bits = (
        dtype == "bfloat16"
        and facts.multiplies_e4m3
        and not any(pair.startswith(("linear=", "scaled_")) for pair in options.kernels)
    )
    weight_bytes = held_weight_bytes(model, dtype, keeps_8_bits=keeps_8_bits)
    cache, max_model_len, tables = settle_cache(
        options, facts, model, dtype,
        weight_bytes=weight_bytes, scheduler=scheduler, reasons=reasons,
    )  # fmt: skip
    config = EngineConfig(
        model=ModelConfig(
            path=str(path),
            served_names=options.served_model_name or (options.model,),
            load_format=options.load_format,
            seed=options.seed,
            dtype=dtype,
            exact=options.dtype == "float32",
            device=device,
            max_model_len=max_model_len,
            shortens=options.max_model_len == AUTO,
            bounded_replay=options.bounded_replay,
            chat_template=_existing_template(options.chat_template),
            weight_bytes=weight_bytes + tables.weight_bytes,
            tables=tables.place,
            host_bytes=tables.host_bytes,
            facts=model,
        ),
        cache=cache,
        scheduler=scheduler,
        kernels=_settle_kernels(options, facts, reasons),
        graphs=settle_graphs(options, facts, scheduler, reasons),
        reasons=tuple(reasons.lines),
    )
    refuse_combinations(config)
    block_bytes = cache_block_bytes(model, cache.dtype, cache.block_tokens)
    if block_bytes:
        check_pool(config, (cache.blocks or cache.arena_bytes // block_bytes) - 1)
    return config


def _settle_scheduler(
    options: EngineOptions, facts: DeviceFacts, model: ModelFacts, reasons: Reasons
) -> SchedulerConfig:
    defaults, asked_tokens = defaults_of(facts), options.max_num_batched_tokens
    seqs = defaults.max_num_seqs
    if asked_tokens != AUTO:
        seqs = min(seqs, asked_tokens)
    max_num_seqs = reasons.pick(
        "max_num_seqs", options.max_num_seqs, seqs, defaults.max_num_seqs_why
    )
    step_tokens = reasons.pick(
        "max_num_batched_tokens",
        asked_tokens,
        max(defaults.step_tokens, max_num_seqs),
        "large enough for full-speed prefill, small enough that running requests keep their pace",
    )
    longest = model.max_position_tokens if options.max_model_len == AUTO else options.max_model_len
    max_waiting_tokens = reasons.pick(
        "max_waiting_tokens",
        options.max_waiting_tokens,
        max(QUEUED_STEPS * step_tokens, longest),
        f"{QUEUED_STEPS} steps of prefill, and never less than one longest prompt",
    )
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=step_tokens,
        policy=options.scheduling_policy,
        max_waiting_requests=options.max_waiting_requests,
        max_waiting_tokens=max_waiting_tokens,
    )


def _settle_kernels(options: EngineOptions, facts: DeviceFacts, reasons: Reasons) -> KernelConfig:
    threads = reasons.pick(
        "threads", options.threads, facts.cores, "every core this process may use"
    )
    prefer: dict[str, str] = {}
    for pair in options.kernels:
        op, _, backend = pair.partition("=")
        if prefer.setdefault(op, backend) != backend:
            raise OptionError(
                f"kernels names two backends for {op}: {prefer[op]} and {backend}",
                hint="name one backend per op",
            )
    return KernelConfig(threads=threads, prefer=tuple(prefer.items()))


def _existing_template(path: str | None) -> str | None:
    if path is not None and not Path(path).is_file():
        raise OptionError(
            f"chat_template is {path!r}, which is no file",
            hint="give a file with a jinja2 template",
        )
    return path


def settle_server(options: ServeOptions) -> ServerConfig:
    """Decide how the server listens.

    Raises:
        OptionError: uds is given together with host or port, or its folder does not exist.
    """
    if options.uds is not None:
        for name in ("host", "port"):
            if name in options.model_fields_set:
                raise OptionError(
                    f"uds is {options.uds!r} and {name} is {getattr(options, name)!r}; "
                    "a server listens on one of them",
                    hint=f"leave {name} or uds out",
                )
        folder = Path(options.uds).absolute().parent
        if not folder.is_dir():
            raise OptionError(f"uds is {options.uds!r}, but {folder} is no folder")
    return ServerConfig(
        host=options.host,
        port=options.port,
        uds=options.uds,
        api_keys=options.api_key,
        allowed_origins=options.allowed_origins,
        max_body_bytes=options.max_body_bytes,
        drain_timeout_s=options.drain_timeout_s,
        log_level=options.log_level,
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """A combination that cannot work: when it holds, what to say, and a value that works."""

    options: tuple[str, ...]
    holds: Callable[[EngineConfig], bool]
    message: Callable[[EngineConfig], str]
    hint: Callable[[EngineConfig], str]


REFUSED: tuple[Refusal, ...] = (
    Refusal(
        ("max_model_len", "model"),
        lambda c: c.model.max_model_len > c.model.facts.max_position_tokens,
        lambda c: (
            f"max_model_len is {c.model.max_model_len}, but the model {c.model.served_names[0]} "
            f"knows {c.model.facts.max_position_tokens} positions"
        ),
        lambda c: f"use max_model_len={c.model.facts.max_position_tokens} or less",
    ),
    Refusal(
        ("max_num_batched_tokens", "max_num_seqs"),
        lambda c: c.scheduler.max_num_batched_tokens < c.scheduler.max_num_seqs,
        lambda c: (
            f"max_num_batched_tokens is {c.scheduler.max_num_batched_tokens}, less than max_num_seqs "
            f"{c.scheduler.max_num_seqs}; a step has a token of every running request"
        ),
        lambda c: (
            f"use max_num_batched_tokens={c.scheduler.max_num_seqs} or more, "
            f"or max_num_seqs={c.scheduler.max_num_batched_tokens} or less"
        ),
    ),
    Refusal(
        ("max_num_batched_tokens", "block_size"),
        lambda c: c.scheduler.max_num_batched_tokens < c.cache.block_tokens,
        lambda c: (
            f"max_num_batched_tokens is {c.scheduler.max_num_batched_tokens}, less than block_size "
            f"{c.cache.block_tokens}; a step fills at least one block of a prompt"
        ),
        lambda c: (
            f"use max_num_batched_tokens={c.cache.block_tokens} or more, "
            f"or block_size={c.scheduler.max_num_batched_tokens} or less"
        ),
    ),
    Refusal(
        ("max_waiting_tokens", "max_model_len"),
        lambda c: c.scheduler.max_waiting_tokens < c.model.max_model_len,
        lambda c: (
            f"max_waiting_tokens is {c.scheduler.max_waiting_tokens}, less than max_model_len "
            f"{c.model.max_model_len}; the longest prompt could never be queued"
        ),
        lambda c: f"use max_waiting_tokens={c.model.max_model_len} or more",
    ),
)
"""Every combination of options that is refused, in the order they are looked at."""


def refuse_combinations(config: EngineConfig) -> None:
    """Raise OptionError for the first row of REFUSED that holds."""
    for refusal in REFUSED:
        if refusal.holds(config):
            raise OptionError(refusal.message(config), hint=refusal.hint(config))


def check_pool(config: EngineConfig, block_count: int) -> None:
    """Refuse a cache that cannot hold one request of max_model_len.

    Args:
        config: the settled config.
        block_count: blocks that requests can hold, once the model's rows are known.

    Raises:
        OptionError: names max_model_len and the option that sized the cache, and values that work.
    """
    block_tokens = config.cache.block_tokens
    needed = math.ceil(config.model.max_model_len / block_tokens)
    if needed <= block_count:
        return
    held = block_count * block_tokens
    if config.cache.blocks is not None:
        sized_by = f"num_blocks_override {config.cache.blocks}"
        works = f"num_blocks_override={config.cache.blocks + needed - block_count}"
    else:
        sized_by = f"kv_cache_memory_bytes {size(config.cache.arena_bytes)}"
        enough = config.cache.arena_bytes * (needed + 1) / max(block_count, 1)
        works = f"kv_cache_memory_bytes={math.ceil(enough / 1024**2)}MiB"
    hint = f"use max_model_len={held} or less, or {works}" if held else f"use {works}"
    raise OptionError(
        f"max_model_len is {config.model.max_model_len}, but {sized_by} holds {held} tokens "
        f"({block_count} blocks of {block_tokens})",
        hint=hint,
    )
