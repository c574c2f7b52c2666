"""Does an engine with bounded replay give the tokens of its model alone, in chunks, cached, preempted and recorded?

A tiny DeepSeek V4.1 in float32. Alone, late layers run for the newest window of a prompt in one chunk; a request that
was preempted begins again with all its tokens as prompt.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.support.numbered import served_v4_1
from tests.support.staged import StagedDriver
from tests.support.steps import a_build, a_model
from tests.support.tiny import VOCAB_TOKENS, tiny_tokenizer, write_checkpoint
from tests.support.tiny_v4 import v4_config, weights_of
from tokamak.cache.holdings import Holdings
from tokamak.config.options import EngineOptions
from tokamak.core.request import SamplingParams
from tokamak.engine.configure import configure
from tokamak.errors import OptionError
from tokamak.llm import LLM
from tokamak.models.deepseek_v4.v4_1 import DeepseekV41
from tokamak.runner.assemble import plan_rank
from tokamak.text.tokenizer import Tokenizer

BLOCK, WINDOW = 8, 8
CONFIG = served_v4_1()
ANSWER = 6
GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)


def ids(count: int, seed: int) -> list[int]:
    """Pseudo-random token ids, the same for the same seed."""
    return np.random.default_rng(seed).integers(20, VOCAB_TOKENS - 10, count).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tiny") / "v4.1"
    return write_checkpoint(place, CONFIG, weights=weights_of(CONFIG))


@pytest.fixture(scope="module")
def alone():
    """The greedy tokens behind some known ones, in a model that nothing else runs on."""
    models = {}
    for bounded in (True, False):
        model = a_model(CONFIG, weights_of(CONFIG), a_build(bounded_replay=bounded))
        model.take_tokenizer(Tokenizer(tiny_tokenizer(), bos_id=None, eos_ids=()))
        assert isinstance(model, DeepseekV41)
        models[bounded] = model

    def tokens(prompt: list[int], count: int, *, bounded: bool = True) -> list[int]:
        driver = StagedDriver(models[bounded], block_tokens=BLOCK)
        hidden = driver.staged({"only": prompt}, {"only": len(prompt)})["only"]
        with torch.inference_mode():
            found = [int(models[bounded].logits(hidden[-1:]).argmax())]
        while len(found) < count:
            found.append(int(driver.step({"only": found[-1:]})["only"].argmax()))
        return found

    return tokens


def start(folder, **options):
    """An engine with small steps and blocks."""
    settings = {
        "dtype": "fp32",
        "max_model_len": 64,
        "block_size": BLOCK,
        "threads": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    return LLM(str(folder), bounded_replay=True, **settings, **options)


@pytest.fixture(scope="module")
def recorded(folder):
    llm = start(
        folder,
        num_blocks_override=60,
        graphs="startup",
        req_graph_sizes=(4,),
        token_graph_sizes=(16,),
    )
    yield llm
    stats = llm.stats()
    assert stats.free_blocks == stats.total_blocks
    llm.close()


def token_ids(outputs):
    return [list(output.token_ids) for output in outputs]


def test_prompts_in_chunks_beside_each_other(recorded, alone):
    prompts = [ids(length, length) for length in (8, 9, 33, 47)]

    found = token_ids(recorded.generate(prompts, GREEDY))

    assert found == [alone(prompt, ANSWER) for prompt in prompts]
    assert found[2:] != [alone(prompt, ANSWER, bounded=False) for prompt in prompts[2:]]


def test_a_prefix_in_the_cache_changes_no_token(recorded, alone):
    first = ids(36, 1)
    (answer,) = token_ids(recorded.generate([first], GREEDY))
    # The same again; a turn behind the answer that is shorter than a window; a start in common.
    prompts = [first, first + answer + ids(3, 2), first[:33] + ids(14, 3)]

    before = recorded.report().late.scheduled_tokens
    outputs = [recorded.generate([prompt], GREEDY)[0] for prompt in prompts]

    assert token_ids(outputs) == [alone(prompt, ANSWER) for prompt in prompts]
    assert recorded.report().late.scheduled_tokens - before == WINDOW * len(prompts)
    # Late layers begin anew in every prompt, so that what is reused ends in front of their window.
    assert [output.usage.cached_tokens for output in outputs] == [24, 32, 32]


def test_a_scored_prompt_runs_whole(recorded, alone):
    prompt = ids(33, 33)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, prompt_logprobs=0)

    (scored,) = recorded.generate([prompt], params)

    assert list(scored.token_ids) == alone(prompt, ANSWER, bounded=False)


def test_preempted_requests_begin_again_with_all_their_tokens_as_prompt(folder, alone, monkeypatch):
    begun: dict[str, list[int]] = {}
    admit = Holdings.admit

    def noted(self, request, *rest):
        begun.setdefault(request.request_id, []).append(len(request.output_ids))
        return admit(self, request, *rest)

    monkeypatch.setattr(Holdings, "admit", noted)
    llm = start(folder, num_blocks_override=14, graphs="off")
    prompts = [ids(20 + at, at) for at in range(3)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    found = token_ids(llm.generate(prompts, params))

    preemptions = llm.stats().preemptions
    llm.close()
    assert preemptions == sum(map(len, begun.values())) - len(prompts) > 0
    for prompt, answer, starts in zip(prompts, found, begun.values(), strict=True):
        for at, end in itertools.pairwise([*starts, len(answer)]):
            assert answer[at:end] == alone(prompt + answer[:at], end - at)


def test_a_model_without_late_layers_refuses_it_by_name(tmp_path):
    folder = write_checkpoint(tmp_path / "v4", v4_config(), weights={})

    with pytest.raises(OptionError, match=r"bounded_replay is true, but DeepseekV4ForCausalLM"):
        plan_rank(
            configure(EngineOptions(model=str(folder), bounded_replay=True, max_model_len=64))
        )
