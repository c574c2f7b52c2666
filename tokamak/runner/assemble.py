"""A config becomes a model with weights, caches and a runner, in one readable order.

The only file above `models` that opens the registry.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tokamak.cache.arena import Arena
from tokamak.cache.groups import CacheGroup, group_sub_caches
from tokamak.cache.layout import lay_out
from tokamak.checkpoint.load import load_model, load_random
from tokamak.checkpoint.source import open_checkpoint
from tokamak.checkpoint.tokenizer import load_tokenizer
from tokamak.config.engine import EngineConfig
from tokamak.config.settle import check_pool
from tokamak.core.request import SamplingParams
from tokamak.device.facts import cpu_facts
from tokamak.layers.build import Build
from tokamak.layers.model import Model
from tokamak.models.registry import find
from tokamak.ops.load import load_backends
from tokamak.ops.sample import token_weights
from tokamak.runner.dummy import NULL_SLOT, dummy_plan
from tokamak.runner.inputs import InputArena
from tokamak.runner.memory import MemoryPlan, plan_memory
from tokamak.runner.runner import ModelRunner
from tokamak.sampling.grammar_state import GrammarFactory
from tokamak.sampling.sampler import Sampler

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

WARM_UP_TOKENS = 17
WARM_UP_REQUESTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A loaded rank: everything a step needs, and what was decided on the way."""

    model: Model
    runner: ModelRunner
    build: Build
    groups: tuple[CacheGroup, ...]
    memory: MemoryPlan
    load_s: dict[str, float]


def assemble(config: EngineConfig) -> Rank:
    """Build, load and warm up a rank.

    Raises:
        ModelError: the checkpoint is unsound, or of a kind we do not implement.
        OptionError: the cache cannot hold one request of max_model_len.
    """
    load_s: dict[str, float] = {}
    with _timed(load_s, "build"):
        build = make_build(config)
        checkpoint = open_checkpoint(Path(config.model.path))
        family = find(config.model.facts.architecture)
        model = family.from_config(checkpoint.config, build).eval()
        groups = group_sub_caches(model.sub_caches())
        memory = plan_memory(config, groups)
        check_pool(config, memory.total_blocks - 1)
    with _timed(load_s, "weights"):
        if config.model.load_format == "random":
            load_random(model, config.model.seed)
        else:
            load_model(model, checkpoint)
    with _timed(load_s, "caches"):
        layout = lay_out(
            groups, block_tokens=config.cache.block_tokens, total_blocks=memory.total_blocks
        )
        model.bind_caches(Arena(layout, build.device).views())
        runner = _make_runner(config, build, model, groups)
    with _timed(load_s, "warm_up"):
        tokens = min(WARM_UP_TOKENS, config.scheduler.max_num_batched_tokens)
        requests = min(WARM_UP_REQUESTS, config.scheduler.max_num_seqs)
        runner.step(dummy_plan(prefill_tokens=tokens, decode_rows=0)).take()
        runner.step(dummy_plan(prefill_tokens=0, decode_rows=requests)).take()
    return Rank(
        model=model, runner=runner, build=build, groups=groups, memory=memory, load_s=load_s
    )


def make_build(config: EngineConfig) -> Build:
    """The facts and choices layers are built from."""
    load_backends()
    return Build(
        facts=cpu_facts(),
        device=torch.device(config.model.device),
        dtype=DTYPES[config.model.dtype],
        exact=config.model.exact,
        max_model_len=config.model.max_model_len,
        prefer=dict(config.kernels.prefer),
    )


def _make_runner(
    config: EngineConfig, build: Build, model: Model, groups: tuple[CacheGroup, ...]
) -> ModelRunner:
    inputs = InputArena(
        build,
        groups,
        max_requests=config.scheduler.max_num_seqs,
        max_tokens=config.scheduler.max_num_batched_tokens,
        block_tokens=config.cache.block_tokens,
    )
    vocab_tokens = config.model.facts.vocab_tokens
    tokenizer = load_tokenizer(Path(config.model.path), load_format=config.model.load_format)
    grammar = GrammarFactory(
        tokenizer.to_json(), vocab_tokens=vocab_tokens, eos_ids=tokenizer.eos_ids
    )
    sampler = Sampler(
        vocab_tokens=vocab_tokens,
        slots=config.scheduler.max_num_seqs + 1,
        device=build.device,
        grammar=grammar,
        entropy=config.model.seed.to_bytes(8, "little"),
        weigh=build.bind(token_weights),
    )
    sampler.admit(
        NULL_SLOT,
        request_id="dummy",
        params=SamplingParams(temperature=0.0),
        sibling=0,
        max_tokens=1,
        stop_ids=frozenset(),
        prompt_tokens=0,
        output_ids=(),
    )
    return ModelRunner(model, inputs, sampler)


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - start
