"""Does an engine that keeps keys and values in fp8 give the same tokens however its steps run and are disturbed?

Compared with itself: what fp8 rounds away changes tokens, how a request is cut, padded, cached or preempted may not.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.tiny import VOCAB_TOKENS, llama_config, qwen3_config, write_checkpoint
from tokamak.config.options import EngineOptions
from tokamak.core.request import SamplingParams
from tokamak.engine.configure import configure
from tokamak.errors import OptionError
from tokamak.llm import LLM
from tokamak.runner.assemble import plan_rank

CONFIGS = {"llama": llama_config(), "qwen3": qwen3_config()}
SETTINGS = {
    "dtype": "fp32",
    "max_model_len": 200,
    "block_size": 16,
    "threads": 1,
    "max_num_seqs": 4,
}
RECORDED = {"graphs": "startup", "req_graph_sizes": (1, 2, 4), "token_graph_sizes": (16, 64)}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)


def ids(count: int, seed: int) -> list[int]:
    """Pseudo-random token ids, the same for the same seed."""
    return np.random.default_rng(seed).integers(20, VOCAB_TOKENS - 10, count).tolist()


SHARED = ids(48, 0)
PROMPTS = [SHARED + ids(3 + 5 * at, at) for at in range(1, 5)]


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", CONFIGS[request.param])


@pytest.fixture
def run(folder):
    """Answers the prompts on a new engine; returns what it gave and its figures."""
    made = []

    def answer(**options):
        llm = LLM(str(folder), **{**SETTINGS, "num_blocks_override": 70, **options})
        made.append(llm)
        return llm.generate(PROMPTS, GREEDY), llm.stats()

    yield answer
    for llm in made:
        llm.close()


def tokens(outputs):
    return [list(output.token_ids) for output in outputs]


def test_recorded_padded_and_eager_steps_give_the_same_tokens(run):
    eager, _ = run(kv_cache_dtype="fp8", graphs="off")
    padded, _ = run(kv_cache_dtype="fp8", token_graph_eager_pad=True, **RECORDED)
    recorded, _ = run(kv_cache_dtype="fp8", **RECORDED)
    exact, _ = run(graphs="off")

    assert tokens(recorded) == tokens(padded) == tokens(eager)
    first = [output.logprobs[0].chosen.logprob for output in eager]
    assert first != [output.logprobs[0].chosen.logprob for output in exact], "fp8 rounds nothing"
    assert first == pytest.approx([o.logprobs[0].chosen.logprob for o in exact], abs=0.5)


def test_preempted_and_reused_rows_give_the_tokens_of_an_undisturbed_run(run):
    plain, calm = run(kv_cache_dtype="fp8", graphs="off", enable_prefix_caching=False)
    tight, pressed = run(kv_cache_dtype="fp8", num_blocks_override=14, **RECORDED)

    assert calm.preemptions == 0
    assert pressed.preemptions > 0
    assert sum(output.usage.cached_tokens for output in tight) > 0
    assert tokens(tight) == tokens(plain)


def planned(folder, **options):
    return plan_rank(configure(EngineOptions(model=str(folder), **SETTINGS, **options)))


def test_the_same_bytes_hold_four_times_the_blocks_of_float32(folder):
    own, fp8 = (
        planned(folder, kv_cache_memory_bytes="1MiB", **asked).start.memory
        for asked in ({}, {"kv_cache_dtype": "fp8"})
    )

    assert 4 * fp8.block_bytes == own.block_bytes
    assert fp8.total_blocks // 4 == own.total_blocks


def test_a_family_that_knows_no_other_format_refuses_fp8_by_name(folder, monkeypatch):
    family = type(planned(folder).model)
    monkeypatch.setattr(family, "cache_dtypes", ())

    with pytest.raises(OptionError, match=r"kv_cache_dtype is fp8, but .*ForCausalLM keeps"):
        planned(folder, kv_cache_dtype="fp8")
