"""The bytes of recordings: one function, measured, saved or default costs, and a reserve that is checked."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.configs import a_config
from tokamak.config.places import CACHE_VARIABLE
from tokamak.errors import PoolOverrun
from tokamak.runner.graph_cost import (
    GraphCost,
    check_reserve,
    cost_path,
    default_cost,
    graph_pool_estimate,
    measured,
    reserve_bytes,
    save_cost,
    saved_cost,
)

MIB = 1024**2

COST = GraphCost(bytes_per_bucket=100, bytes_per_row=7, source="measured")


def estimate(
    requests: tuple[int, ...] = (),
    tokens: tuple[int, ...] = (),
    late: tuple[int, ...] = (),
    *,
    pools="per_graph",
    q_width=1,
    choice=0,
) -> int:
    return graph_pool_estimate(
        request_buckets=requests,
        token_buckets=tokens,
        late_buckets=late,
        q_width=q_width,
        pools=pools,
        cost=COST,
        choice_row_bytes=choice,
    )


def test_without_buckets_nothing_is_set_aside() -> None:
    assert estimate() == 0
    assert reserve_bytes(estimate(), "cuda") == 0


def test_the_buckets_of_a_graph_share_a_pool_and_two_graphs_do_not() -> None:
    requests, tokens = estimate((1, 2, 4)), estimate(tokens=(64, 128))

    assert requests == 3 * 100 + 4 * 7
    assert tokens == 2 * 100 + 128 * 7
    assert estimate((1, 2, 4), (64, 128)) == requests + tokens
    assert estimate((1, 2, 4), (64, 128), (64,)) == requests + tokens + 100 + 64 * 7


def test_a_pool_of_its_own_for_every_bucket_adds_up() -> None:
    assert estimate((1, 2, 4), (64,), pools="per_bucket") == 4 * 100 + (1 + 2 + 4 + 64) * 7


def test_a_recorded_choice_holds_the_scores_of_its_rows() -> None:
    assert estimate((1, 2, 4), choice=1000) == estimate((1, 2, 4)) + 4 * 1000
    each = estimate((1, 2, 4), pools="per_bucket", choice=1000)
    assert each == estimate((1, 2, 4), pools="per_bucket") + 7 * 1000


def test_a_decode_request_of_several_tokens_takes_as_many_rows() -> None:
    assert estimate((1, 4), q_width=3) == 2 * 100 + 12 * 7


@given(st.integers(0, 10**5), st.integers(1, 10**5), st.sets(st.integers(1, 4096), min_size=2))
def test_two_recordings_in_one_pool_give_their_own_bytes_back(
    bucket: int, row: int, sizes: set[int]
) -> None:
    *_, second, largest = sorted(sizes)
    bytes_a = bucket + largest * row

    cost = measured(rows_a=largest, bytes_a=bytes_a, rows_b=second, bytes_b=bytes_a + bucket)

    both = graph_pool_estimate(
        request_buckets=(second, largest),
        token_buckets=(),
        late_buckets=(),
        q_width=1,
        pools="per_graph",
        cost=cost,
        choice_row_bytes=0,
    )
    assert both == bytes_a + bucket
    assert (cost.bytes_per_bucket, cost.bytes_per_row) == (bucket, row)
    assert cost.source == "measured"


@given(st.integers(1, 4096), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_measured_cost_never_falls_below_what_was_measured(
    rows: int, first: int, more: int
) -> None:
    cost = measured(rows_a=rows, bytes_a=first, rows_b=max(1, rows // 2), bytes_b=first + more)

    assert 2 * cost.bytes_per_bucket + rows * cost.bytes_per_row >= first + more


def test_the_larger_of_two_costs_counts() -> None:
    few = GraphCost(bytes_per_bucket=1, bytes_per_row=9, source="measured")

    assert few.at_least(COST) == GraphCost(bytes_per_bucket=100, bytes_per_row=9, source="measured")


def test_a_default_cost_counts_the_outputs_of_recorded_matrices() -> None:
    shapes = [(1000, 64), (96, 64), (64, 96), (64,), (1000, 64)]

    cost = default_cost(shapes, vocab_tokens=1000, number_bytes=4)

    assert cost.bytes_per_row == 2 * (96 + 64) * 4
    assert cost.source == "default"


def test_a_saved_cost_comes_back_marked_as_saved(tmp_path: Path) -> None:
    path = tmp_path / "costs" / "one.json"

    save_cost(path, COST)

    assert saved_cost(path) == GraphCost(bytes_per_bucket=100, bytes_per_row=7, source="saved")
    assert [file.name for file in path.parent.iterdir()] == ["one.json"]


def test_a_cost_nobody_saved_is_none(tmp_path: Path) -> None:
    assert saved_cost(tmp_path / "none.json") is None


def test_a_cost_that_cannot_be_read_is_named_and_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"bytes_per_bucket": "many"}')

    assert saved_cost(path) is None
    assert "bad.json" in caplog.text


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")

    save_cost(tmp_path / "file" / "one.json", COST)

    assert str(tmp_path / "file") in caplog.text


def test_a_cost_is_kept_per_model_arithmetic_and_geometry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    model = {"hidden_size": 64}
    same = cost_path(a_config(dtype="fp32"), model)

    others = [
        cost_path(a_config(dtype="fp32"), {"hidden_size": 65}),
        cost_path(a_config(dtype="bf16", graphs="startup"), model),
        cost_path(a_config(dtype="fp32", block_size=8), model),
        cost_path(a_config(dtype="fp32", kernels="rms_norm=reference"), model),
        cost_path(a_config(dtype="fp32", graphs="off"), model),
    ]

    assert cost_path(a_config(dtype="fp32", max_num_seqs=3), model) == same
    assert len({same, *others}) == 6
    assert same.is_relative_to(tmp_path)
    assert json.dumps(model) not in same.name


@pytest.mark.parametrize("real_mib", [80, 100, 120])
def test_recordings_near_the_estimate_are_no_warning(
    real_mib: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    line = check_reserve(estimate=100 * MIB, real=real_mib * MIB, source="measured", backend="sim")

    assert not caplog.records
    assert "estimated 100 MiB (measured)" in line


@pytest.mark.parametrize("real_mib", [70, 125])
def test_recordings_a_fifth_from_the_estimate_are_warned_of(
    real_mib: int, caplog: pytest.LogCaptureFixture
) -> None:
    check_reserve(estimate=100 * MIB, real=real_mib * MIB, source="saved", backend="sim")

    assert f"recordings take {real_mib} MiB" in caplog.text


def test_whole_pages_of_small_pools_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    check_reserve(estimate=1000, real=2 * MIB, source="measured", backend="sim")

    assert not caplog.records


def test_recordings_beyond_the_reserve_end_the_start() -> None:
    reserve = reserve_bytes(100 * MIB, "sim")

    check_reserve(estimate=100 * MIB, real=reserve, source="measured", backend="sim")
    with pytest.raises(PoolOverrun, match=r"more than the 129 MiB set aside .*graphs=off"):
        check_reserve(estimate=100 * MIB, real=reserve + 1, source="measured", backend="sim")


def test_a_default_that_was_too_small_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_reserve(estimate=1 * MIB, real=50 * MIB, source="default", backend="sim")

    assert "default" in caplog.text
