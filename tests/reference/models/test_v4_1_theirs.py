"""Does V4.1 compute what another library's module of it computes?"""

import importlib.util

import pytest

from tests.support.steps import ModelDriver
from tests.support.theirs_v4_1 import their_v4_1_scores
from tests.support.tiny_v4 import a_v4_1, golden_tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vendor("nemo_automodel"),
    pytest.mark.skipif(
        importlib.util.find_spec("nemo_automodel") is None,
        reason="nemo-automodel is not installed; tools/environment.py says how, without what it would pull",
    ),
]

WORST = {"rounded": 2e-2, "plain": 1e-4}
"""One number that is rounded another way moves a row; without rounding only sums are in another order."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return their_v4_1_scores(tmp_path_factory.mktemp("theirs"))


@pytest.mark.parametrize("caches", WORST)
def test_scores_are_those_of_another_reading(theirs, caches):
    ours = ModelDriver(a_v4_1(rounds_caches=caches == "rounded")).step({"only": golden_tokens()})

    differences = (ours["only"] - theirs[caches]).abs().amax(dim=1)

    assert differences.median() < 2e-5
    assert differences.max() < WORST[caches]
    assert (ours["only"].argmax(dim=1) == theirs[caches].argmax(dim=1)).all()
