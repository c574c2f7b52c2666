"""Do models whose layers compress what they keep give a request its tokens, whatever is cached, cut or preempted?

The whole engine on tiny DeepSeek V4 and V4.1 in float32, compared token for token with the model run alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.numbered import served_v4_1
from tests.support.steps import ModelDriver, a_build, a_model
from tests.support.tiny import VOCAB_TOKENS, tiny_tokenizer, write_checkpoint
from tests.support.tiny_v4 import v4_config, weights_of
from tokamak.core.request import SamplingParams
from tokamak.errors import OptionError
from tokamak.llm import LLM
from tokamak.text.tokenizer import Tokenizer

BLOCK = 8
CONTEXT = 128
RECORDED = {"graphs": "startup", "req_graph_sizes": (1, 2, 4), "token_graph_sizes": (16,)}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LATE = 1 + 7 * 3
"""Rows of a prompt that late layers of the small V4.1 run for: windows of 8 rows, three layers."""


CONFIGS = {
    "v4": v4_config(),
    "v4.1": served_v4_1(),
}


def ids(count: int, seed: int) -> list[int]:
    """Pseudo-random token ids, the same for the same seed."""
    return np.random.default_rng(seed).integers(20, VOCAB_TOKENS - 10, count).tolist()


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    config = CONFIGS[request.param]
    place = tmp_path_factory.mktemp("tiny") / request.param
    return write_checkpoint(place, config, weights=weights_of(config))


@pytest.fixture(scope="module")
def alone(folder):
    """The greedy tokens of a prompt in a model that nothing else runs on."""
    config = CONFIGS[folder.name]

    def tokens(prompt: list[int], count: int = 8) -> list[int]:
        model = a_model(config, weights_of(config), a_build())
        model.take_tokenizer(Tokenizer(tiny_tokenizer(), bos_id=None, eos_ids=()))
        return ModelDriver(model, block_tokens=BLOCK).greedy("alone", prompt, count)

    return tokens


@pytest.fixture
def make_llm(folder):
    made = []

    def make(**options):
        settings = {
            "dtype": "fp32",
            "max_model_len": CONTEXT,
            "block_size": BLOCK,
            "threads": 1,
            "num_blocks_override": 70,
            **({} if options.get("graphs") == "off" else RECORDED),
        }
        made.append(LLM(str(folder), **{**settings, **options}))
        return made[-1]

    yield make
    for llm in made:
        stats = llm.stats()
        assert (stats.running_requests, stats.waiting_requests) == (0, 0)
        assert stats.free_blocks == stats.total_blocks
        llm.close()


def token_ids(outputs):
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize(
    "options",
    [{}, {"graphs": "off"}, {"max_num_batched_tokens": 16}, {"num_blocks_override": None}],
)
def test_prompts_of_many_lengths_at_once(make_llm, alone, options):
    llm = make_llm(max_num_seqs=4, **options)
    prompts = [ids(length, length) for length in (1, 7, 8, 9, 15, 16, 17, 33)]

    found = token_ids(llm.generate(prompts, GREEDY))

    assert found == [alone(prompt) for prompt in prompts]


def hit(folder, prompt: int, shared: int) -> int:
    """Tokens that are reused of a prefix that another prompt of that length was written with.

    Late layers of V4.1 leave the newest rows of a long prompt alone, and run for `LATE` rows without any before them.
    """
    blocks = shared // BLOCK
    if folder.name == "v4.1" and prompt > LATE:
        blocks = min(blocks, (prompt - LATE) // BLOCK)
    return blocks * BLOCK


@pytest.mark.parametrize("shared", [8, 16, 17, 40])
def test_a_shared_prefix_is_reused_and_changes_no_token(make_llm, alone, folder, shared):
    llm = make_llm()
    prefix = ids(shared, 5)
    prompts = [prefix + ids(9, seed) for seed in (1, 2)]
    # Again as a whole: all but its last token may come from the cache.
    prompts.append(prompts[0])

    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]

    assert token_ids(outputs) == [alone(prompt) for prompt in prompts]
    length = len(prompts[0])
    assert outputs[1].usage.cached_tokens == hit(folder, length, shared)
    assert outputs[2].usage.cached_tokens == hit(folder, length, length - 1)


def test_a_short_prompt_is_written_whole_for_longer_ones(make_llm, alone):
    llm = make_llm()
    prefix = ids(LATE, 7)
    prompts = [prefix, prefix + ids(10, 8)]

    outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]

    assert token_ids(outputs) == [alone(prompt) for prompt in prompts]
    assert outputs[1].usage.cached_tokens == LATE // BLOCK * BLOCK


@pytest.mark.parametrize("length", [21, 60])
def test_an_answer_is_reused_as_the_prefix_of_the_next_turn(make_llm, alone, length):
    llm = make_llm()
    first = ids(length, 3)
    (answer,) = token_ids(llm.generate([first], GREEDY))
    turn = first + answer + ids(5, 4)

    (output,) = llm.generate([turn], GREEDY)

    # The last token of an answer is never run.
    assert output.usage.cached_tokens == (len(first) + len(answer) - 1) // BLOCK * BLOCK
    assert list(output.token_ids) == alone(turn)


def test_preemption_changes_no_token(make_llm, alone):
    llm = make_llm(num_blocks_override=18, max_num_seqs=4)
    prompts = [ids(20 + at, at) for at in range(4)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    found = token_ids(llm.generate(prompts, params))

    assert llm.stats().preemptions > 0
    assert found == [alone(prompt, 30) for prompt in prompts]


@pytest.mark.parametrize("graphs", ["startup", "off"])
def test_late_layers_run_for_the_newest_rows_of_prompts_alone(make_llm, alone, folder, graphs):
    llm = make_llm(graphs=graphs, max_num_batched_tokens=32)
    before = llm.report().late.scheduled_tokens
    prompts = [ids(70, 1), ids(9, 2)]

    found = token_ids([llm.generate([prompt], GREEDY)[0] for prompt in prompts])

    assert found == [alone(prompt) for prompt in prompts]
    late = llm.report().late.scheduled_tokens - before
    assert late == {"v4": 0, "v4.1": LATE + 9}[folder.name]


def test_a_prompt_whose_scores_are_asked_for_runs_whole(make_llm, folder):
    llm = make_llm(graphs="off")
    prompt = ids(50, 1)
    scored = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)

    before = llm.report().late.scheduled_tokens
    (output,) = llm.generate([prompt], scored)

    assert len(output.prompt_logprobs) == len(prompt)
    late = llm.report().late.scheduled_tokens - before
    assert late == {"v4": 0, "v4.1": len(prompt)}[folder.name]


def test_long_prompts_in_small_steps_need_few_blocks_of_newest_rows(make_llm, alone):
    # Two requests of 100 tokens hold 26 blocks; of the newest rows there are 16.
    llm = make_llm(max_num_seqs=2, max_num_batched_tokens=16, req_graph_sizes=(1, 2))
    prompts = [ids(100 + at, at) for at in range(5)]

    found = token_ids(llm.generate(prompts + prompts[:2], GREEDY))

    expected = [alone(prompt) for prompt in prompts]
    assert found == expected + expected[:2]


def test_a_block_that_would_cut_an_entry_in_two_is_refused(make_llm, folder):
    multiple = {"v4": 8, "v4.1": 2}[folder.name]

    with pytest.raises(OptionError, match=f"block_size is {multiple + 1}") as refused:
        make_llm(block_size=multiple + 1)

    assert f"block_size={2 * multiple}" in str(refused.value)


def test_random_weights_need_no_tokenizer_of_their_own(make_llm):
    llm = make_llm(load_format="random")

    (output,) = llm.generate([ids(9, 1)], GREEDY)

    assert len(output.token_ids) == 8
