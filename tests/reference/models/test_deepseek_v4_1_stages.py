"""Do late layers of V4.1 that run for the newest rows of a prompt alone change a number that anybody reads?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.staged import StagedDriver
from tests.support.tiny_v4 import a_v4_1, golden_tokens

PROMPT = 80
LATE = 1 + 7 * 4
"""Rows of the tiny model's late layers: windows of 8 rows, four layers."""


@pytest.fixture(scope="module", params=[True, False], ids=["rounded caches", "plain caches"])
def case(request):
    model = a_v4_1(rounds_caches=request.param)
    return model, golden_tokens()


def chunks_of(count, seed):
    """Borders of random chunks, none of them of one token."""
    rng, at, found = np.random.default_rng(seed), 0, []
    while at < count:
        size = min(int(rng.integers(2, 40)), count - at)
        size += count - at - size == 1
        found.append((at, at + size))
        at += size
    return found


def prefill(driver, tokens, chunks, prompt):
    """The hidden state of the last row."""
    for start, end in chunks:
        hidden = driver.staged({"only": tokens[start:end]}, {"only": prompt})["only"]
    return hidden[-1]


@pytest.mark.parametrize("seed", range(4))
def test_cut_prompts_give_what_uncut_ones_give_bit_for_bit(case, seed):
    model, tokens = case
    chunks = chunks_of(PROMPT, seed)

    uncut = StagedDriver(model)
    expected = prefill(uncut, tokens, chunks, 0)
    then = [uncut.step({"only": [token]})["only"] for token in tokens[PROMPT:]]
    cut = StagedDriver(model)
    found = prefill(cut, tokens, chunks, PROMPT)
    behind = [cut.step({"only": [token]})["only"] for token in tokens[PROMPT:]]

    assert (uncut.late_rows, cut.late_rows) == (PROMPT, LATE)
    assert torch.equal(found, expected)
    assert torch.equal(torch.cat(behind), torch.cat(then))


def test_one_row_less_is_too_few(case):
    model, tokens = case
    expected = prefill(StagedDriver(model), tokens, [(0, PROMPT)], 0)

    # A prompt said to be a token longer than it is runs late layers for a row less.
    short = StagedDriver(model)
    found = prefill(short, tokens, [(0, PROMPT)], PROMPT + 1)

    assert short.late_rows == LATE - 1
    assert not torch.equal(found, expected)


def test_both_stages_are_the_forward(case):
    model, tokens = case

    whole = StagedDriver(model).step({"only": tokens[:40]})["only"]
    hidden = StagedDriver(model).staged({"only": tokens[:40]}, {})["only"]

    assert torch.equal(model.logits(hidden), whole)


def test_rows_that_are_cut_are_zero_and_short_prompts_are_not_cut(case):
    model, tokens = case
    driver = StagedDriver(model)

    first = driver.staged({"only": tokens[:20]}, {"only": PROMPT})["only"]
    second = driver.staged({"only": tokens[20:PROMPT]}, {"only": PROMPT})["only"]
    short = driver.staged({"short": tokens[:LATE]}, {"short": LATE})["short"]

    assert not first.any()
    assert not second[:-LATE].any()
    assert second[-LATE:].any(dim=1).all()
    assert short.any(dim=1).all()


@pytest.mark.parametrize("how", ["eager_pad", "replay"])
def test_recordings_of_both_stages_give_what_eager_ones_do(case, how):
    model, tokens = case
    prompts = {"long": PROMPT, "short": 17, "old": 5}
    steps = [
        {"old": tokens[:5]},
        {"long": tokens[:30], "short": tokens[40:50], "old": tokens[5:6]},
        {"long": tokens[30:56], "short": tokens[50:57], "old": tokens[6:7]},
        {"long": tokens[56:PROMPT], "old": tokens[7:8]},
    ]

    eager = StagedDriver(model)
    expected = [eager.staged(step, prompts) for step in steps]
    other = StagedDriver(model, how=how)
    found = [other.staged(step, prompts) for step in steps]

    for step, right, hidden in zip(steps, expected, found, strict=True):
        for name in step:
            # Rows that see what was never written are no numbers, and nobody reads them.
            counts = ~right[name].isnan().any(dim=1)
            torch.testing.assert_close(
                hidden[name][counts], right[name][counts], atol=1e-4, rtol=1e-4
            )
    assert not expected[-1]["long"][-1].isnan().any()

    if how == "replay":
        assert [graph.report().kind for graph in (other.tokens, other.decoder)] == [
            "token",
            "decoder",
        ]
        assert other.tokens.report().replays == other.decoder.report().replays == len(steps)


@pytest.mark.parametrize("seed", range(2))
def test_replays_give_what_padded_eager_steps_give_bit_for_bit(case, seed):
    model, tokens = case
    chunks = chunks_of(PROMPT, seed)

    padded = prefill(StagedDriver(model, how="eager_pad"), tokens, chunks, PROMPT)
    replayed = prefill(StagedDriver(model, how="replay"), tokens, chunks, PROMPT)

    assert torch.equal(replayed, padded)
