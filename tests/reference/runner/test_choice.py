"""Are the likeliest tokens the same when their choice is recorded, and is everything else sampled as before?"""

from __future__ import annotations

import pytest

from tests.support.tiny import llama_config, tiny_weights, write_checkpoint
from tokamak.core.request import SamplingParams
from tokamak.errors import StepError
from tokamak.llm import LLM

BAD_ID = 77
"""A token whose vector holds a NaN."""
SIZES = {"req_graph_sizes": (1, 2, 4), "token_graph_sizes": ()}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WISHES = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, logprobs=2, max_tokens=12, ignore_eos=True),
]
PROMPTS = [[20, 21, 22], [30, 31], [40, 41, 42, 43], [50]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = llama_config()
    weights = tiny_weights(config)
    weights["model.embed_tokens.weight"][BAD_ID] = float("nan")
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", config, weights=weights)


@pytest.fixture
def start(folder):
    made = []

    def make(**options):
        settings = {"dtype": "fp32", "threads": 1, "max_num_seqs": 4, "num_blocks_override": 60}
        made.append(LLM(str(folder), **settings, **options))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def choices_replayed(llm: LLM) -> int:
    """How many steps have replayed the choice."""
    (report,) = [graph for graph in llm.report().graphs if graph.name == "choice"]
    return report.replays


def test_plain_rows_replay_their_choice_and_get_the_eager_tokens(start):
    expected = [output.token_ids for output in start(graphs="off").generate(PROMPTS, GREEDY)]
    llm = start(graphs="startup", **SIZES)

    outputs = llm.generate(PROMPTS, GREEDY)

    assert [output.token_ids for output in outputs] == expected
    assert choices_replayed(llm) >= 11


@pytest.mark.parametrize("at", range(1, len(WISHES)))
def test_a_step_with_any_other_wish_is_sampled_op_by_op(start, at):
    wishes = [WISHES[at], GREEDY]
    expected = start(graphs="off").generate(PROMPTS[:2], wishes)
    llm = start(graphs="startup", **SIZES)

    outputs = llm.generate(PROMPTS[:2], wishes)

    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert choices_replayed(llm) == 0


def test_scores_that_are_no_numbers_end_their_own_request_in_a_replayed_choice(start):
    llm = start(graphs="startup", **SIZES)
    (expected,) = llm.generate([PROMPTS[0]], GREEDY)

    with pytest.raises(StepError, match="the model's scores hold nan"):
        llm.generate([PROMPTS[0], [20, BAD_ID]], GREEDY)

    (again,) = llm.generate([PROMPTS[0]], GREEDY)
    assert again.token_ids == expected.token_ids
    assert choices_replayed(llm) > 22
