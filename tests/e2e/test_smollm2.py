"""Does the whole engine give a real model's recorded greedy tokens, however its requests are run?

The record was made with another implementation in fp32 (`data/smollm2_greedy.json` says how). A case counts up to its
end-of-sequence token, or to 64 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokamak.core.request import FinishReason, SamplingParams
from tokamak.engine.gathered import RequestOutput
from tokamak.llm import LLM

pytestmark = [pytest.mark.weights, pytest.mark.slow]

RECORD = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text("utf-8"))
CASES = RECORD["cases"]
PROMPTS = [case["prompt_ids"] for case in CASES]
GREEDY = SamplingParams(temperature=0, max_tokens=64)
OPTIONS = {"dtype": "fp32", "max_model_len": 720, "max_num_seqs": 8}


def expected_ids(case: dict) -> tuple[int, ...]:
    end = case["eos_index"]
    return tuple(case["output_ids"] if end is None else case["output_ids"][: end + 1])


EXPECTED = [expected_ids(case) for case in CASES]


def ids_of(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm():
    with LLM("smollm2-135m", **OPTIONS) as llm:
        yield llm


@pytest.fixture
def cold(llm):
    llm.reset_prefix_cache()
    return llm


@pytest.mark.parametrize("at", range(len(CASES)))
def test_a_prompt_alone_gives_the_recorded_tokens(cold, at):
    (output,) = cold.generate(PROMPTS[at], GREEDY)

    ended = CASES[at]["eos_index"] is not None
    assert output.token_ids == EXPECTED[at]
    assert output.usage.cached_tokens == 0
    assert output.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)


def test_all_prompts_at_once_give_the_recorded_tokens(cold):
    outputs = cold.generate(PROMPTS, GREEDY)

    assert ids_of(outputs) == EXPECTED


def test_a_warm_prefix_cache_changes_nothing(cold):
    cold.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1))

    outputs = cold.generate(PROMPTS, GREEDY)

    assert ids_of(outputs) == EXPECTED
    assert all(output.usage.cached_tokens > 0 for output in outputs)


def test_messages_become_the_recorded_prompts_and_answers(cold):
    outputs = cold.chat([case["messages"] for case in CASES], GREEDY)

    assert [output.prompt for output in outputs] == [case["prompt"] for case in CASES]
    assert [list(output.prompt_ids) for output in outputs] == PROMPTS
    ended = [at for at, case in enumerate(CASES) if case["eos_index"] is not None]
    assert [outputs[at].text for at in ended] == [CASES[at]["output_text"] for at in ended]


def test_the_five_most_likely_tokens_have_the_recorded_logprobs(cold):
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)

    outputs = cold.generate(PROMPTS, params)

    for case, output in zip(CASES, outputs, strict=True):
        for recorded, entry in zip(case["top5_logprobs_first8"], output.logprobs, strict=True):
            found = {alternative.token_id: alternative.logprob for alternative in entry.top}
            assert found == pytest.approx(dict(recorded), abs=1e-3)


def test_chunks_of_sixteen_tokens_change_nothing():
    options = {**OPTIONS, "max_num_batched_tokens": 16, "block_size": 16}
    with LLM("smollm2-135m", **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)

        most_a_step = llm.stats().scheduled_tokens / llm.stats().steps

    assert ids_of(outputs) == EXPECTED
    assert most_a_step <= 16


@pytest.mark.parametrize(
    "graphs",
    [
        {"graphs": "off"},
        {"graphs": "on-demand", "graph_backend": "sim", "verify_graphs_rate": 0.2},
        {"graphs": "startup", "req_graph_sizes": (1, 4, 8), "token_graph_sizes": (64, 512)},
        {
            "graphs": "startup",
            "req_graph_sizes": (),
            "token_graph_sizes": (64, 512),
            "token_graph_eager_pad": True,
        },
    ],
    ids=["off", "on-demand", "startup", "eager-pad"],
)
def test_graphs_change_nothing(graphs):
    with LLM("smollm2-135m", **OPTIONS, **graphs) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        again = llm.generate(PROMPTS, GREEDY)

    assert ids_of(outputs) == EXPECTED
    assert ids_of(again) == EXPECTED


def test_preemption_changes_nothing():
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    options = {**OPTIONS, "block_size": 16, "num_blocks_override": 52}
    with LLM("smollm2-135m", **options) as llm:
        # The longest prompt first: it holds most blocks, and to the end, while the others grow.
        outputs = llm.generate(PROMPTS[::-1], params)

        stats = llm.stats()

    ids = ids_of(outputs)[::-1]
    assert [own[: len(case)] for own, case in zip(ids, EXPECTED, strict=True)] == EXPECTED
    assert stats.preemptions > 0
    assert stats.free_blocks == stats.total_blocks


WORDS = (
    "apple", "river", "candle", "mirror", "garden", "window", "silver", "forest", "pencil", "bridge", "orange", "castle",
    "button", "planet", "turtle", "basket", "hammer", "velvet", "island", "rocket", "ladder", "pepper", "engine", "violin",
    "marble", "helmet", "ribbon", "saddle", "tunnel", "walnut", "anchor", "copper", "dragon", "falcon", "guitar", "jacket",
    "kettle", "lizard", "magnet", "needle", "oyster", "parrot", "quartz", "rabbit", "spider", "temple", "urchin", "zipper",
)  # fmt: skip
CONCURRENT = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 25, 31, 32, 33, 48)


def a_password_prompt(at: int) -> str:
    """Prompts of very different lengths, each with a word of its own."""
    padding = "Remember this well. " * (at % 7 * 3)
    word = WORDS[at]
    return f"{padding}The password of door {at} is {word}. Repeat the password of door {at}:"


def test_batch_sizes_between_buckets_mix_up_no_rows():  # case 20
    prompts = [a_password_prompt(at) for at in range(len(WORDS))]
    params = [
        SamplingParams(temperature=0, max_tokens=8 + at % 17, ignore_eos=True)
        for at in range(len(WORDS))
    ]
    options = {"dtype": "fp32", "max_model_len": 256, "max_num_seqs": 48}
    with LLM("smollm2-135m", **options, graphs="off") as llm:
        alone = [llm.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
    sizes = {"req_graph_sizes": (1, 4, 8, 16, 32, 48), "token_graph_sizes": (64, 512)}

    with LLM("smollm2-135m", **options, **sizes, graphs="startup") as llm:
        for count in CONCURRENT:
            together = llm.generate(prompts[:count], params[:count])
            assert ids_of(together) == ids_of(alone[:count]), count

    for at, output in enumerate(alone):
        strangers = [word for other, word in enumerate(WORDS) if other != at]
        assert not any(word in output.text for word in strangers), output.text
