"""Are late layers of V4.1 that run for a window of each prompt alone what is published, and near to all layers?"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.staged import StagedDriver
from tests.support.steps import a_build
from tests.support.tiny_v4 import a_v4_1, golden_tokens

WINDOW = 8
TOKENS = golden_tokens()

PUBLISHED = {
    (True, 8): [1.2522, 0.3513, 0.2527, -0.9391],
    (True, 9): [0.0162, 0.4787, 0.0626, -0.5429],
    (True, 40): [-1.3103, 0.7225, 0.1266, 1.9211],
    (True, 64): [0.1367, -1.8479, -0.0678, -0.5077],
    (False, 64): [0.2200, -1.5899, 0.5413, -0.1973],
}
"""With and without rounding, by the prompt's tokens: the first scores of its last row."""

PRINTED = 6e-5
ROUNDED = 4e-3
"""Of one prompt, most likely with numbers next to ties: noise of 1e-6 in embeddings moves its scores by as much."""


def a_bounded(*, rounds_caches=True):
    return a_v4_1(a_build(bounded_replay=True), rounds_caches=rounds_caches)


@pytest.fixture(scope="module")
def bounded():
    return a_bounded()


@pytest.fixture(scope="module")
def exact():
    return a_v4_1()


def last(driver, prompt, borders=()):
    """Scores of a prompt's last row, run in chunks between borders."""
    edges = [0, *borders, prompt]
    for start, end in itertools.pairwise(edges):
        hidden = driver.staged({"only": TOKENS[start:end]}, {"only": prompt})["only"]
    return driver.model.logits(hidden[-1:])


def divergence(expected, found):
    """Of each row's distribution, in nats; both are logarithms of shares."""
    return (expected.exp() * (expected - found)).sum(-1)


@pytest.mark.parametrize("rounds", [True, False], ids=["rounded caches", "plain caches"])
def test_last_rows_are_the_published_ones(bounded, rounds):
    model = bounded if rounds else a_bounded(rounds_caches=False)
    for (of, prompt), expected in PUBLISHED.items():
        if of == rounds:
            driver = StagedDriver(model)
            found = last(driver, prompt)[0, :4]
            off = float((found - torch.tensor(expected)).abs().max())
            assert off < (ROUNDED if prompt == WINDOW + 1 else PRINTED), prompt
            assert driver.late_rows == WINDOW


@pytest.mark.parametrize("prompt", [2, WINDOW])
def test_prompts_of_a_window_are_exact_bit_for_bit(bounded, exact, prompt):
    cut, whole = StagedDriver(bounded), StagedDriver(exact)

    assert torch.equal(last(cut, prompt), last(whole, prompt))
    for token in TOKENS[prompt : prompt + 4]:
        assert torch.equal(
            cut.step({"only": [token]})["only"], whole.step({"only": [token]})["only"]
        )


def test_tokens_behind_longer_prompts_are_scored_as_near_as_stated(bounded, exact):
    whole = StagedDriver(exact).step({"only": TOKENS})["only"].log_softmax(-1)
    firsts, gaps, agree = [], [], []
    for prompt in (24, 33, 40, 48):
        driver = StagedDriver(bounded)
        firsts.append(divergence(whole[prompt - 1 : prompt], last(driver, prompt).log_softmax(-1)))
        found = driver.step({"only": TOKENS[prompt:]})["only"].log_softmax(-1)
        gaps.append(divergence(whole[prompt:], found))
        agree.append(whole[prompt:].argmax(-1) == found.argmax(-1))

    assert 1e-3 < float(torch.cat(firsts).mean()) < 1e-2
    assert all(1e-5 < float(gap.mean()) < 5e-4 for gap in gaps)
    assert float(torch.cat(gaps).max()) < 1e-2
    assert float(torch.cat(agree).float().mean()) >= 0.97


@pytest.mark.parametrize("by", [None, -1, 1], ids=["none", "a row early", "a row late"])
def test_another_first_row_of_windows_shows(bounded, monkeypatch, by):
    expected = torch.tensor(PUBLISHED[True, 40])
    for layer in bounded._layers:
        attention = layer.attention

        def moved(*given, right=attention._attend):
            starts = given[10]
            if starts is not None:
                starts = None if by is None else starts + by
            return right(*given[:10], starts, *given[11:])

        monkeypatch.setattr(attention, "_attend", moved)

    found = last(StagedDriver(bounded), 40)[0, :4]

    # Rows in front were never written; they are no numbers here.
    assert bool(found.isnan().all()) == (by != 1)
    assert not torch.allclose(found, expected, atol=100 * PRINTED)


@pytest.mark.parametrize("borders", [(38,), (32,), (30, 33, 36)], ids=str)
def test_chunks_change_nothing(bounded, borders):
    driver = StagedDriver(bounded)

    found = last(driver, 40, borders)

    assert driver.late_rows == WINDOW
    torch.testing.assert_close(found, last(StagedDriver(bounded), 40), atol=1e-5, rtol=1e-5)


def test_recordings_give_what_padded_steps_give_bit_for_bit(bounded):
    prompts = {"long": 40, "short": 6, "old": 5}
    steps = [
        {"old": TOKENS[:5]},
        {"long": TOKENS[:35], "short": TOKENS[40:43], "old": TOKENS[5:6]},
        {"long": TOKENS[35:40], "short": TOKENS[43:46], "old": TOKENS[6:7]},
    ]

    padded = StagedDriver(bounded, how="eager_pad", buckets=(48,))
    expected = [padded.staged(step, prompts) for step in steps]
    replayed = StagedDriver(bounded, how="replay", buckets=(48,))
    found = [replayed.staged(step, prompts) for step in steps]

    assert replayed.late_rows == 5 + (3 + 3 + 1) + (5 + 3 + 1)
    for left, right in zip(found, expected, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in right)
    torch.testing.assert_close(
        bounded.logits(found[-1]["long"][-1:]),
        last(StagedDriver(bounded), 40),
        atol=1e-4,
        rtol=1e-4,
    )
