"""Does every mistake that leaves a V4.1 decoder fluent show in its golden scores, and as much as is stated?"""

from __future__ import annotations

import pytest
import torch

from tests.support.steps import ModelDriver
from tests.support.tiny_v4 import GOLDEN_ROWS, a_v4_1, golden_tokens
from tests.support.v4_1_mistakes import MISTAKES

pytestmark = pytest.mark.slow

PRINTED = 6e-5
"""How exactly golden numbers are written down."""

MOST, MEAN = 1.35, 2.0
"""Up to which factor a mistake may move scores more or less than is stated: a mistake can be made in several ways."""


def scores_of(model):
    return ModelDriver(model).step({"only": golden_tokens()})["only"]


def off_by(scores):
    """How far the golden rows are from what is written down."""
    return max(
        float((scores[row, : len(first)] - torch.tensor(first)).abs().max())
        for row, (first, _) in GOLDEN_ROWS[True].items()
    )


@pytest.fixture(scope="module")
def right():
    return scores_of(a_v4_1())


def test_without_a_mistake_scores_are_the_golden_ones(right):
    assert off_by(right) < PRINTED


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_moves_the_golden_scores_as_stated(name, right, monkeypatch):
    mistake = MISTAKES[name]

    wrong = scores_of(mistake.model(monkeypatch))

    most = float((wrong - right).abs().max())
    ours, theirs = right.log_softmax(-1), wrong.log_softmax(-1)
    mean = float((ours.exp() * (ours - theirs)).sum(-1).mean())
    assert mistake.most / MOST < most < mistake.most * MOST
    assert mistake.mean / MEAN < mean < mistake.mean * MEAN
    assert off_by(wrong) > 100 * PRINTED
