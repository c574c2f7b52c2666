"""A plan tells memory by purpose, blocks, sizes and where the cost comes from; the doctor what is really there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.published_v4_1 import V41_FLASH
from tests.support.tiny import write_checkpoint
from tests.support.tiny_v4 import SMALL as SMALL_V4_1
from tests.support.tiny_v4 import v4_1_config, weights_of
from tokamak.cli import main
from tokamak.config.places import CACHE_VARIABLE
from tokamak.graphs.request_graph import ReqGraph

SMALL = ["--dtype", "fp32", "--threads", "1", "--max-num-seqs", "3", "--max-model-len", "64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _costs_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))


def told(capsys: pytest.CaptureFixture[str], command: str, folder: Path, *flags: str) -> Any:
    assert main.run([command, str(folder), "--json", *SMALL, *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_tells_memory_blocks_and_sizes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = told(capsys, "plan", folder, "--graphs", "startup", "--token-graph-sizes", "16")

    memory = plan["memory_bytes"]
    assert memory["all"] == sum(count for name, count in memory.items() if name != "all")
    assert memory["graphs"] == plan["graphs"]["reserve_bytes"] > plan["graphs"]["estimate_bytes"]
    assert memory["cache"] == plan["cache"]["total_blocks"] * plan["cache"]["block_bytes"]
    assert plan["cache"]["longest_requests"] == 3
    assert plan["graphs"]["request_sizes"] == [1, 2, 3]
    assert plan["graphs"]["token_sizes"] == [16]
    assert plan["graphs"]["cost"] == "default"
    assert {line["field"] for line in plan["config"]} >= {"graphs", "dtype", "max_model_len"}


def test_a_plan_without_graphs_sets_nothing_aside(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = told(capsys, "plan", folder, "--graphs", "off")

    assert plan["memory_bytes"]["graphs"] == 0
    assert (plan["graphs"]["when"], plan["graphs"]["request_sizes"]) == ("off", [])


def test_a_plan_is_shown_as_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main.run(["plan", str(folder), *SMALL, "--graphs", "startup"])

    shown = capsys.readouterr().out
    assert all(title in shown for title in ("memory", "cache", "graphs", "1 to 3"))
    assert "a default from the model's shapes" in shown


def test_contradicting_graph_flags_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main.run(["plan", str(folder), *SMALL, "--graphs", "off", "--verify-graphs"])

    assert status == 2
    assert capsys.readouterr().err == (
        "tokamak: error: verify_graphs is true, but graphs is off (asked for) "
        "(hint: leave verify_graphs out, or use graphs=startup)\n"
    )


def test_the_doctor_tells_when_and_why_graphs_are_recorded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs = told(capsys, "doctor", folder, "--graphs", "off")["graphs"]

    assert (graphs["when"], graphs["why"], graphs["backend"]) == ("off", "asked for", "none")
    assert {graph["state"].split(":")[0] for graph in graphs["graphs"]} == {"off"}


def test_the_doctor_verifies_every_size_as_a_start_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--verify-graphs", "--token-graph-sizes", "16")

    graphs = told(capsys, "doctor", folder, *flags)["graphs"]

    assert graphs["when"] == "startup"
    assert {(row["graph"], row["bucket"]) for row in graphs["verified"]} == {
        ("request", 1), ("request", 2), ("request", 3), ("token", 16),
    }  # fmt: skip
    assert all(row["ok"] for row in graphs["verified"])


def test_the_doctor_names_a_size_that_differs(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = ReqGraph.replay
    monkeypatch.setattr(ReqGraph, "replay", lambda graph, key, ctx: replay(graph, key, ctx) + 1)

    status = main.run(["doctor", str(folder), *SMALL, "--verify-graphs"])

    assert status == 1
    assert "request bucket 1 at size 1" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "bytes_a_token"), [("bfloat16", 3200), ("fp32", 6400)])
def test_a_token_of_the_published_v4_1_takes_the_stated_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, bytes_a_token: int
) -> None:
    """Of 40 layers 36 keep no entries: three makers keep a row for two tokens, and one a row for each."""
    (tmp_path / "config.json").write_text(json.dumps(V41_FLASH), encoding="utf-8")
    flags = ("--load-format", "random", "--dtype", dtype, "--num-blocks-override", "8000")

    plan = told(capsys, "plan", tmp_path, *flags)

    cache = plan["cache"]
    assert plan["model"]["architecture"] == "DeepseekV41ForCausalLM"
    assert cache["block_bytes"] == bytes_a_token * cache["block_tokens"]
    # Two tables of n-grams in 8 bits, and the backbone.
    tables = (384006168 + 384016682) * 256 * 33 / 32
    backbone = (plan["memory_bytes"]["weights"] - tables) / (2 if dtype == "bfloat16" else 4)
    assert backbone == pytest.approx(551.6e9, rel=0.02)


def test_tables_that_stay_in_the_file_are_shown_beside_the_memory_of_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = v4_1_config(**SMALL_V4_1)
    write_checkpoint(tmp_path, config, weights=weights_of(config))

    mapped, copied = (
        told(capsys, "plan", tmp_path, "--dtype", "fp32", *flags)
        for flags in ((), ("--engram-tables", "device"))
    )

    table = 4 * 660 * 32
    assert mapped["host_memory_bytes"] == {"tables": table}
    assert copied["host_memory_bytes"] == {"tables": 0}
    difference = copied["memory_bytes"]["weights"] - mapped["memory_bytes"]["weights"]
    assert difference == table
