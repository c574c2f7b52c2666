"""Does the model run on a GPU where there is one, with sizes that fit it?"""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.configs import CPU, GIB, GPU, SMALL_MODEL, a_config
from tokamak.config.engine import EngineConfig, ModelFacts
from tokamak.config.settle_device import settle_device, step_bytes
from tokamak.device.facts import GpuProbe
from tokamak.errors import OptionError

EIGHT_BILLION = ModelFacts(
    architecture="LlamaForCausalLM",
    vocab_tokens=128256,
    max_position_tokens=131072,
    stored_dtype="bfloat16",
    weight_bytes=0,
    parameters=8_030_000_000,
    cache_token_numbers=2 * 32 * 8 * 128,
    step_token_numbers=4 * 4096 + 3 * 14336,
)


def reason(config: EngineConfig, name: str) -> str:
    return next(line.why for line in config.reasons if line.field == name)


def test_a_gpu_is_taken_where_there_is_one_and_triton():
    chosen = settle_device("auto", CPU, GpuProbe(GPU))

    assert chosen.facts is GPU
    assert chosen.why == "there is a GPU: a GPU"


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        (GpuProbe(None, "NVML finds no GPU"), "no NVIDIA GPU: NVML finds no GPU"),
        (
            GpuProbe(dataclasses.replace(GPU, libraries=frozenset())),
            "there is a GPU (a GPU), but triton is not installed",
        ),
    ],
    ids=["no GPU", "no triton"],
)
def test_otherwise_the_cpu_is_taken_with_a_reason(probe, why):
    chosen = settle_device("auto", CPU, probe)

    assert (chosen.facts, chosen.why) == (CPU, why)


def test_what_is_asked_for_is_taken_or_refused():
    assert settle_device("cpu", CPU, GpuProbe(GPU)).facts is CPU
    without_triton = dataclasses.replace(GPU, libraries=frozenset())
    assert settle_device("cuda", CPU, GpuProbe(without_triton)).facts is without_triton

    with pytest.raises(OptionError, match=r"device is cuda.*NVML finds no GPU"):
        settle_device("cuda", CPU, GpuProbe(None, "NVML finds no GPU"))


def test_a_gpu_has_defaults_of_its_own():
    config = a_config(facts=GPU, model=EIGHT_BILLION)

    assert (config.model.device, config.model.dtype) == ("cuda", "bfloat16")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 8192)
    assert (config.cache.block_tokens, config.graphs.backend) == (16, "cuda")
    assert config.model.max_model_len == EIGHT_BILLION.max_position_tokens
    assert all(line.why and line.value != "auto" for line in config.reasons)


def test_what_is_asked_of_a_gpu_is_kept():
    config = a_config(
        facts=GPU,
        model=EIGHT_BILLION,
        device="cuda",
        dtype="float32",
        max_num_seqs=8,
        memory_fraction=0.5,
    )

    assert (config.model.dtype, config.model.exact) == ("float32", True)
    assert config.scheduler.max_num_seqs == 8
    assert reason(config, "memory_fraction") == "asked for"


def test_the_cache_of_a_gpu_is_what_the_weights_and_a_step_leave():
    config = a_config(facts=GPU, model=EIGHT_BILLION)

    taken = step_bytes(EIGHT_BILLION, number_bytes=2, step_tokens=8192, max_num_seqs=256)
    room = int(GPU.memory_bytes * 0.9) - 2 * EIGHT_BILLION.parameters - taken
    assert config.cache.room_bytes == config.cache.arena_bytes == room
    assert reason(config, "kv_cache_memory_bytes").endswith("less the weights and a step")


def test_a_step_holds_the_rows_of_its_tokens_and_the_scores_of_its_requests():
    alone = step_bytes(EIGHT_BILLION, number_bytes=2, step_tokens=1000, max_num_seqs=1)
    wider = step_bytes(EIGHT_BILLION, number_bytes=2, step_tokens=2000, max_num_seqs=1)
    more = step_bytes(EIGHT_BILLION, number_bytes=2, step_tokens=1000, max_num_seqs=3)

    assert wider - alone == 1000 * EIGHT_BILLION.step_token_numbers * 2
    # At least the scores in float32, and the weights of a draw in float64.
    assert more - alone >= 2 * EIGHT_BILLION.vocab_tokens * (4 + 8)


def test_a_context_that_a_small_gpu_cannot_hold_is_shortened():
    small = dataclasses.replace(GPU, memory_bytes=24 * GIB)

    config = a_config(facts=small, model=EIGHT_BILLION)

    held = config.cache.arena_bytes // (EIGHT_BILLION.cache_token_numbers * 2)
    assert config.model.max_model_len < EIGHT_BILLION.max_position_tokens
    assert config.model.max_model_len <= held
    assert reason(config, "max_model_len") == "the most the cache holds for one request"


def test_a_gpu_too_small_for_a_step_says_what_it_takes():
    tiny = dataclasses.replace(GPU, memory_bytes=18 * GIB)

    with pytest.raises(OptionError, match=r"memory_fraction is 0\.9.*a step takes.*GiB"):
        a_config(facts=tiny, model=EIGHT_BILLION)


def test_a_cpu_keeps_its_defaults():
    config = a_config(facts=CPU, model=SMALL_MODEL)

    assert config.model.device == "cpu"
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (32, 512)
    assert config.cache.room_bytes == CPU.memory_bytes // 2 - 4 * SMALL_MODEL.parameters
