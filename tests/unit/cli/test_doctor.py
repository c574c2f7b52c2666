"""The doctor tells machine, versions, backends and reasons, for people and as JSON."""

from __future__ import annotations

import json

import pytest

import tokamak
from tokamak.cli import main
from tokamak.device.facts import cpu_facts


def test_json_has_device_versions_and_a_reason_for_every_op(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = main.run(["doctor", "--no-model", "--json"])

    report = json.loads(capsys.readouterr().out)
    assert status == 0
    assert report["device"]["cores"] == cpu_facts().cores
    assert report["versions"]["tokamak"] == tokamak.__version__
    assert report["versions"]["torch"]
    assert {choice["op"] for choice in report["choices"]} == set(report["backends"])
    assert all(choice["why"] for choice in report["choices"])
    assert all(names[-1] == "reference" for names in report["backends"].values())


def test_tables_name_the_same_things(capsys: pytest.CaptureFixture[str]) -> None:
    main.run(["doctor", "--no-model"])

    shown = capsys.readouterr().out
    assert all(title in shown for title in ("device", "versions", "ops", "rms_norm", "reference"))


def test_a_backend_may_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    main.run(["doctor", "--no-model", "--json", "--kernels", "rms_norm=reference"])

    choices = {row["op"]: row for row in json.loads(capsys.readouterr().out)["choices"]}
    assert (choices["rms_norm"]["backend"], choices["rms_norm"]["why"]) == (
        "reference",
        "asked for",
    )


def test_a_backend_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status = main.run(["doctor", "--no-model", "--kernels", "rms_norm=magic"])

    assert status == 1
    assert "op rms_norm has no backend 'magic'" in capsys.readouterr().err
