"""Are rows of n-gram memories fetched where a forward begins, and joined where they are read, in every way to run it?"""

from __future__ import annotations

import pytest
import torch

from tests.support.graph_families import a_small_v4_1
from tests.support.steps import ModelDriver, a_build
from tests.support.wired_rank import a_rank
from tokamak.core.context import current
from tokamak.errors import UnjoinedSideStream
from tokamak.layers import engram
from tokamak.layers.table import Table

TOKENS = {"only": [5, 9, 11, 40, 7]}


@pytest.fixture(scope="module")
def model():
    return a_small_v4_1(a_build())


@pytest.fixture
def driver(model):
    return ModelDriver(model, block_tokens=4)


def test_fetches_come_first_and_joins_where_a_memory_lies(model):
    names = model.regions().names

    assert names[:3] == ("engram_fetch", "sparse_attention", "engram_join")


def test_a_fetch_that_is_not_joined_is_named_where_an_eager_forward_ends(driver, monkeypatch):
    monkeypatch.setattr(engram, "engram_join_region", lambda values, layer: None)

    with pytest.raises(UnjoinedSideStream, match=r"'engram \d+', opened in .* the forward ends"):
        driver.step(TOKENS)


def test_a_join_that_is_called_past_its_op_ends_the_start(monkeypatch):
    """It would wait in a recording for what a region forks anew in every step."""
    monkeypatch.setattr(engram, "engram_join_region", engram.engram_join_region.body)

    with pytest.raises(
        UnjoinedSideStream, match=r"opened in region 'engram_fetch' and is joined in segment"
    ):
        a_rank(a_small_v4_1, req_graph_sizes=(), token_graph_sizes=(8,))


def test_a_step_that_fails_between_fetch_and_join_leaves_the_next_one_alone(driver, monkeypatch):
    expected = driver.step(TOKENS)["only"]
    with monkeypatch.context() as patch:
        patch.setattr(engram, "engram_join_region", lambda values, layer: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.step({"broken": TOKENS["only"]})

    assert torch.equal(driver.step({"again": TOKENS["only"]})["again"], expected)


def test_tables_are_read_beside_the_compute_stream(driver, monkeypatch):
    opened, read = [], Table.read

    def seen(table, rows, out):
        opened.extend(current().streams._opened_in)
        read(table, rows, out)

    monkeypatch.setattr(Table, "read", seen)
    driver.step(TOKENS)

    assert len(opened) == 1
