"""Are a request's scores the same however its tokens are cut into steps, and whoever shares them?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.oracle import Oracle
from tests.support.steps import ModelDriver, a_model
from tests.support.tiny import mistral_config, qwen3_config, tiny_weights, write_checkpoint

PROMPT_TOKENS = 30


@pytest.fixture(
    scope="module", params=[mistral_config(), qwen3_config()], ids=["mistral-window", "qwen3"]
)
def case(request, tmp_path_factory):
    """A model and the oracle over the same weights."""
    weights = tiny_weights(request.param)
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), request.param, weights=weights)
    return a_model(request.param, weights), Oracle(folder)


requests = st.fixed_dictionaries(
    {
        "token_ids": st.lists(st.integers(0, 319), min_size=1, max_size=PROMPT_TOKENS),
        "chunks": st.lists(st.integers(1, 9), min_size=PROMPT_TOKENS, max_size=PROMPT_TOKENS),
    }
)


@settings(max_examples=25, deadline=None)
@given(
    drawn=st.lists(requests, min_size=1, max_size=4),
    block_tokens=st.sampled_from([1, 4, 16]),
    padding=st.integers(0, 3),
)
def test_scores_do_not_depend_on_cuts_neighbours_blocks_or_padding(
    case, drawn, block_tokens, padding
):
    model, oracle = case
    driver = ModelDriver(model, blocks=160, block_tokens=block_tokens)
    left = {str(at): list(request["token_ids"]) for at, request in enumerate(drawn)}
    scores = {name: [] for name in left}

    turn = 0
    while any(left.values()):
        work = {}
        for name, token_ids in left.items():
            taken = drawn[int(name)]["chunks"][turn]
            if token_ids:
                work[name], left[name] = token_ids[:taken], token_ids[taken:]
        outputs = driver.step(work, padding=padding)
        for name, rows in outputs.items():
            scores[name].append(rows)
        turn += 1

    for name, rows in scores.items():
        expected = oracle.scores(drawn[int(name)]["token_ids"])
        torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-4, atol=1e-4)
