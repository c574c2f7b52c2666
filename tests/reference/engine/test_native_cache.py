"""Does an engine whose caches are packed in the model's own formats give what one with plain caches gives, bit by bit?

Token for token and score for score on a tiny DeepSeek V4.1, however its requests are cut, cached, padded or preempted.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.numbered import served_v4_1
from tests.support.steps import ModelDriver, a_build
from tests.support.tiny import VOCAB_TOKENS, llama_config, write_checkpoint
from tests.support.tiny_v4 import SMALL, a_v4_1, v4_config, weights_of
from tokamak.config.options import EngineOptions
from tokamak.core.request import SamplingParams
from tokamak.engine.configure import configure
from tokamak.errors import OptionError
from tokamak.llm import LLM
from tokamak.runner.assemble import plan_rank

SETTINGS = {
    "dtype": "fp32",
    "max_model_len": 128,
    "block_size": 8,
    "threads": 1,
    "max_num_seqs": 4,
}
RECORDED = {"graphs": "startup", "req_graph_sizes": (1, 2, 4), "token_graph_sizes": (16,)}
PARAMS = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True, logprobs=2)


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(20, VOCAB_TOKENS - 10, count).tolist()


SHARED = ids(16, 0)
PROMPTS = [SHARED + ids(3 + at, at) for at in range(1, 5)]


def test_in_bfloat16_a_text_in_parts_scores_the_same():
    plain, native = (
        ModelDriver(a_v4_1(a_build(torch.bfloat16, cache_dtype=kept), **SMALL), block_tokens=8)
        for kept in ("", "native")
    )

    for part in (PROMPTS[0], PROMPTS[0][:1], PROMPTS[1][:9], PROMPTS[1][:1]):
        expected = plain.step({"only": part}, padding=1)["only"]
        found = native.step({"only": part}, padding=1)["only"]
        assert torch.equal(found, expected)


def test_every_row_that_is_rounded_is_a_record():
    kept = a_v4_1(a_build(torch.bfloat16, cache_dtype="native"), **SMALL).sub_caches()

    assert {cache.name for cache in kept if cache.dtype == "uint8"} == {
        "window", "late_window", "entries_2", "entries_1", "index_keys_2", "index_keys_1",
    }  # fmt: skip
    assert {cache.name for cache in kept if cache.dtype != "uint8"} == {"open_groups_2"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = served_v4_1()
    place = tmp_path_factory.mktemp("tiny") / "v4.1"
    return write_checkpoint(place, config, weights=weights_of(config))


def answered(folder, **options):
    """Tokens and scores of prompts, and of two again whose prefixes are cached; and what became of them."""
    with LLM(str(folder), **{**SETTINGS, **options}) as llm:
        outputs = [*llm.generate(PROMPTS, PARAMS), *llm.generate(PROMPTS[:2], PARAMS)]
        cached, preempted = sum(o.usage.cached_tokens for o in outputs), llm.stats().preemptions
    scores = [[place.chosen.logprob for place in output.logprobs] for output in outputs]
    return [list(output.token_ids) for output in outputs], scores, cached, preempted


def test_every_token_and_score_is_that_of_plain_caches(folder):
    """Prompts come in chunks, steps are replayed, and blocks for all are too few."""
    tight = {**RECORDED, "max_num_batched_tokens": 16, "num_blocks_override": 18}

    plain = answered(folder, **tight)
    native = answered(folder, kv_cache_dtype="native", **tight)

    assert native == plain
    assert native[2] > 0
    assert native[3] > 0


def planned(folder, **options):
    return plan_rank(configure(EngineOptions(model=str(folder), **SETTINGS, **options)))


def test_the_same_bytes_hold_more_blocks(folder):
    plain, native = (
        planned(folder, kv_cache_memory_bytes="4MiB", **asked).start.memory
        for asked in ({}, {"kv_cache_dtype": "native"})
    )

    assert native.total_blocks > 2 * plain.total_blocks


@pytest.mark.parametrize("config", [v4_config(), llama_config()], ids=["v4", "llama"])
def test_a_model_that_was_not_trained_to_round_its_caches_refuses_by_name(tmp_path, config):
    folder = write_checkpoint(tmp_path / "model", config, weights={"unused": torch.zeros(1)})

    with pytest.raises(OptionError, match=r"kv_cache_dtype is native, but \w+ForCausalLM keeps"):
        planned(folder, kv_cache_dtype="native", load_format="random")


def test_a_v4_1_whose_rounding_is_off_refuses():
    with pytest.raises(OptionError, match="kv_cache_dtype is native, but this DeepseekV41"):
        a_v4_1(a_build(cache_dtype="native"), rounds_caches=False)
