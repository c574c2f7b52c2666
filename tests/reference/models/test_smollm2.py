"""Does the real SmolLM2 file, through loader and model, give the recorded greedy tokens?

The record was made with another implementation (see `tests/e2e/data/smollm2_greedy.json`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.oracle import Oracle
from tests.support.steps import ModelDriver, a_build
from tokamak.checkpoint.fetch import resolve_model
from tokamak.checkpoint.load import load_model
from tokamak.checkpoint.source import open_checkpoint
from tokamak.models.registry import find

pytestmark = [pytest.mark.weights]

CASES = json.loads(
    (Path(__file__).parents[2] / "e2e" / "data" / "smollm2_greedy.json").read_text(encoding="utf-8")
)["cases"]
FIRST_TOKENS = 8


@pytest.fixture(scope="module")
def path():
    return resolve_model("smollm2-135m", progress=False)


@pytest.fixture(scope="module")
def model(path):
    checkpoint = open_checkpoint(path)
    family = find(checkpoint.config["architectures"][0])
    model = family.from_config(checkpoint.config, a_build(max_model_len=1024))
    load_model(model, checkpoint)
    return model


def test_eight_requests_in_one_batch_begin_with_the_recorded_tokens(model):
    driver = ModelDriver(model, blocks=100, block_tokens=16)
    names = [str(index) for index in range(len(CASES))]
    output_ids = {name: [] for name in names}

    work = {name: case["prompt_ids"] for name, case in zip(names, CASES, strict=True)}
    for turn in range(FIRST_TOKENS):
        scores = driver.step(work)
        for name, case in zip(names, CASES, strict=True):
            logprobs = scores[name][-1].log_softmax(-1)
            output_ids[name].append(int(logprobs.argmax()))
            for token_id, logprob in case["top5_logprobs_first8"][turn]:
                assert logprobs[token_id].item() == pytest.approx(logprob, abs=1e-3)
        work = {name: [ids[-1]] for name, ids in output_ids.items()}

    assert [output_ids[name] for name in names] == [
        case["output_ids"][:FIRST_TOKENS] for case in CASES
    ]


def test_a_request_alone_in_chunks_gives_all_recorded_tokens_up_to_its_end(model):
    case = CASES[0]
    last = case["eos_index"]
    driver = ModelDriver(model, blocks=20, block_tokens=16)

    driver.step({"only": case["prompt_ids"][:16]})
    output_ids = driver.greedy("only", case["prompt_ids"][16:], last + 1)

    assert output_ids == case["output_ids"][: last + 1]


def test_the_oracle_reads_the_same_file_to_the_same_tokens(path):
    case = CASES[0]

    output = Oracle(path).generate(case["prompt_ids"], 64, {2})

    assert output.token_ids == case["output_ids"][: case["eos_index"] + 1]
