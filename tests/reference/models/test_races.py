"""Do V4 and V4.1 leave alone what their side streams work on, until they wait for them?"""

import re
from dataclasses import replace

import pytest

from tests.support import steps
from tests.support.configs import GPU
from tests.support.interpreted_model import MODELS
from tests.support.races import Watch, WatchedStreams
from tests.support.steps import ModelDriver, a_build
from tokamak.layers.moe_rooted import RootedExperts
from tokamak.layers.residual import MixSite

PARTS = ([5, 9, 33, 2, 7, 11, 30], [20])
PLAIN = replace(GPU, libraries=frozenset())
"""A GPU without kernels of ours: those are no operators of PyTorch's, and would not be seen."""


def watched(monkeypatch, name):
    """A watch of two steps of a model, both of few rows."""
    watch = Watch()
    monkeypatch.setattr(steps, "SideStreams", lambda device: WatchedStreams(watch))
    driver = ModelDriver(MODELS[name](replace(a_build(), facts=PLAIN, exact=False)), block_tokens=8)
    with watch:
        for part in PARTS:
            driver.step({"only": part})
    return watch


@pytest.mark.parametrize("name", MODELS)
def test_nothing_a_side_stream_uses_is_touched_or_given_away(monkeypatch, name):
    watch = watched(monkeypatch, name)

    assert watch.races == []
    assert {"shared expert"} <= set(watch.joined)
    assert ("coefficients" in watch.joined) is (name == "V4.1")


def use_before_the_join(monkeypatch):
    right = MixSite.beside

    def beside(self, streams):
        found = right(self, streams)
        found.read.clone()
        return found

    monkeypatch.setattr(MixSite, "beside", beside)


def change_what_is_read(monkeypatch):
    right = RootedExperts._choose

    def choose(self, x, token_ids):
        found = right(self, x, token_ids)
        x.mul_(1.0)
        return found

    monkeypatch.setattr(RootedExperts, "_choose", choose)


def let_go_of_what_is_read(monkeypatch):
    right = MixSite.beside
    monkeypatch.setattr(MixSite, "beside", lambda self, streams: right(self, streams.clone()))


@pytest.mark.parametrize(
    ("mistake", "race"),
    [
        (use_before_the_join, "reads what coefficients writes"),
        (change_what_is_read, "writes what shared expert uses"),
        (let_go_of_what_is_read, "coefficients reads .* nobody holds"),
    ],
)
def test_a_race_is_seen(monkeypatch, mistake, race):
    mistake(monkeypatch)

    watch = watched(monkeypatch, "V4.1")

    assert watch.races
    assert all(re.search(race, each) for each in watch.races)
