"""Does V4.1 give its golden numbers, in one pass, in chunks and token by token?"""

from __future__ import annotations

import pytest
import torch

from tests.support.steps import ModelDriver, a_build
from tests.support.tiny_v4 import GOLDEN_ROWS, WIDE, a_v4_1, golden_tokens

PRINTED = 6e-5
"""How exactly golden numbers are written down."""

STABLE = {True: 1e-3, False: 2e-5}
"""By whether caches are rounded: another order of sums moves a number over a border now and then."""


@pytest.fixture(scope="module", params=[True, False], ids=["rounded caches", "plain caches"])
def case(request):
    """Whether caches are rounded, the model, and its scores of all golden tokens in one pass."""
    model = a_v4_1(rounds_caches=request.param)
    return request.param, model, ModelDriver(model).step({"only": golden_tokens()})["only"]


def test_the_golden_scores(case):
    rounded, _, scores = case

    for row, (first, best) in GOLDEN_ROWS[rounded].items():
        assert (scores[row, : len(first)] - torch.tensor(first)).abs().max() < PRINTED
        assert int(scores[row].argmax()) == best


@pytest.mark.parametrize(
    "parts", [[20] + 76 * [1], [7, 9, 13, 16, 51]], ids=["prompt then tokens", "chunks"]
)
@pytest.mark.parametrize("block_tokens", [2, 16])
def test_a_text_in_parts_scores_like_one_in_a_pass(case, parts, block_tokens):
    rounded, model, expected = case
    driver, tokens = ModelDriver(model, block_tokens=block_tokens), golden_tokens()

    scores, at = [], 0
    for part in parts:
        scores.append(driver.step({"only": tokens[at : at + part]})["only"])
        at += part

    assert (torch.cat(scores) - expected).abs().max() < STABLE[rounded]


def test_ragged_requests_in_mixed_steps_score_like_each_alone(case):
    rounded, model, expected = case
    driver, tokens = ModelDriver(model), golden_tokens()

    driver.step({"a": tokens[:5], "b": tokens[:18]})
    mixed = driver.step({"a": tokens[5:14], "b": tokens[18:19]}, padding=3)
    decoded = driver.step({"a": tokens[14:15], "b": tokens[19:20], "c": tokens[:1]}, padding=2)

    for rows, found in (
        (slice(5, 14), mixed["a"]),
        (slice(18, 19), mixed["b"]),
        (slice(14, 15), decoded["a"]),
        (slice(19, 20), decoded["b"]),
        (slice(0, 1), decoded["c"]),
    ):
        assert (found - expected[rows]).abs().max() < STABLE[rounded]


def test_bfloat16_stays_near_float32(case):
    # Choices of experts and entries flip in bfloat16: only the first rows, which see all there is, stay near.
    rounded, _, expected = case
    model = a_v4_1(a_build(torch.bfloat16), rounds_caches=rounded)

    scores = ModelDriver(model).step({"only": golden_tokens(6)})["only"]

    assert (scores - expected[:6]).std() < 0.3 * expected[:6].std()


def test_tiny_rows_are_normed_by_the_epsilon_of_the_config():
    """An epsilon of 1e-6 would change scores by 2.5 where embeddings are small."""
    model = a_v4_1(rounds_caches=False)
    model._embedding._table *= 1e-2
    coarse = a_v4_1(rounds_caches=False, rms_norm_eps=1e-6)
    coarse._embedding._table *= 1e-2

    ours = ModelDriver(model).step({"only": golden_tokens(24)})["only"]
    theirs = ModelDriver(coarse).step({"only": golden_tokens(24)})["only"]

    assert (ours - theirs).abs().max() > 0.5


@pytest.fixture(scope="module")
def wide():
    """A model with heads and windows as wide as the published ones, and its scores of a text in one pass.

    Every entry is chosen: a choice among nearly equal ones would turn with the last bit of a score.
    """
    every = {**WIDE, "index_topk": 300, "candidate_topk_blocks": 75}
    model = a_v4_1(a_build(max_model_len=512), rounds_caches=False, **every)
    return model, ModelDriver(model, block_tokens=16).step({"only": golden_tokens(300)})["only"]


@pytest.mark.parametrize("cut", [1, 127, 128, 129, 130, 255, 257])
def test_cuts_at_the_edges_of_windows_change_no_score(wide, cut):
    model, expected = wide
    driver, tokens = ModelDriver(model, block_tokens=16), golden_tokens(300)

    first = driver.step({"only": tokens[:cut]})["only"]
    decoded = [driver.step({"only": [token]})["only"] for token in tokens[cut : cut + 3]]
    rest = driver.step({"only": tokens[cut + 3 :]})["only"]

    scores = torch.cat([first, *decoded, rest])
    assert (scores - expected).abs().max() < STABLE[False]
