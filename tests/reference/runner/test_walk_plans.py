"""Is the walk through index keys planned once a forward for all layers that score, also where steps are replayed?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.support.tiny_v4 import SMALL, a_v4_1
from tests.support.wired_rank import Driver, WiredRank, a_prompt, a_rank
from tokamak.cache.groups import group_sub_caches
from tokamak.ops.walk_plan import host, reference
from tokamak.ops.walk_plan.host import walk_plan_reference
from tokamak.runner import inputs

PROGRAMS, CHUNK, MOST = 5, 4, 6
LENGTHS = {"short": 3, "long": 30}
SCORED = {"index_keys_2": 2, "index_keys_1": 1}
"""Sub-caches of index keys, and the tokens of a key: two layers score the first, one the second; one keeps to lists."""


@dataclass
class Walked:
    """A rank of a tiny V4.1 with two requests whose prompts are cached."""

    rank: WiredRank
    driver: Driver

    @property
    def groups(self) -> dict[str, str]:
        """The group of each sub-cache of index keys."""
        return {
            kept.name: group.name
            for group in group_sub_caches(self.rank.model.sub_caches())
            for kept in group.sub_caches
            if kept.name in SCORED
        }

    def fills(self) -> dict[str, int]:
        """Fills so far of every group's views of decode steps."""
        found: dict[str, int] = {}
        for views in self.rank.runner._inputs._decode_views.values():
            for name, view in views.inputs.rows.items():
                found[name] = found.get(name, 0) + view.fills
        return found

    def plan(self, sub_cache: str) -> np.ndarray:
        """The plan that lies in the storage of its group."""
        launch = self.rank.runner._inputs.buffers[self.groups[sub_cache]].launch
        (plans,) = launch._plans.values()
        assert len(plans) == 1, "these rows are scored in one band"
        return plans[0].numpy()

    def specified(self, sub_cache: str) -> np.ndarray:
        """The plan of the step that has just run."""
        computed = [self.driver.requests[name].computed for name in LENGTHS]
        bounds = np.array(computed) // SCORED[sub_cache]
        return walk_plan_reference(np.arange(len(computed)), bounds, PROGRAMS, MOST)


@pytest.fixture
def walked(monkeypatch):
    """Programs walk on a CPU too, and chunks of keys are as short as the contexts of tiny models ask for."""
    monkeypatch.setattr(inputs, "walk_programs", lambda facts, device: PROGRAMS)
    for module in (host, reference):
        monkeypatch.setattr(module, "CHUNK", CHUNK)

    def start(**options):
        changes = {**SMALL, "index_source_layer_ids": [1, 2, 3, 4]}
        rank = a_rank(lambda build: a_v4_1(build, **changes), **options)
        driver = Driver(rank.runner)
        for seed, (name, length) in enumerate(LENGTHS.items()):
            driver.add(name, a_prompt(length, seed))
            for tokens in (min(length, 20), length - min(length, 20)):
                if tokens:
                    driver.step({name: tokens})
        return Walked(rank, driver)

    return start


def test_an_eager_decode_step_plans_once_for_each_kind_of_keys(walked):
    run = walked(graphs="off")
    before = run.fills()

    run.driver.step(decode=list(LENGTHS))

    after = run.fills()
    fresh = {name: count - before.get(name, 0) for name, count in after.items()}
    assert fresh == {name: int(name in run.groups.values()) for name in after}
    for name in SCORED:
        assert run.plan(name).any()
        assert np.array_equal(run.plan(name), run.specified(name))


def test_a_replayed_decode_step_walks_by_the_plan_of_its_own_rows(walked):
    run = walked(req_graph_sizes=(2,), token_graph_sizes=())
    recorded = run.fills()
    plans = []

    for _ in range(5):
        run.driver.step(decode=list(LENGTHS))
        for name in SCORED:
            assert np.array_equal(run.plan(name), run.specified(name))
        plans.append(run.plan("index_keys_1").tolist())

    assert run.rank.steps("request_graph") >= 5
    assert run.fills() == recorded, "a replay fills nothing from the host"
    assert plans[0] != plans[-1]
