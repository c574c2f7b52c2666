"""Is a record that became slower told from one that did not?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.compare import compare, main


def a_record(preparation: float, step: float = 500.0, device: str = "a cpu") -> dict[str, object]:
    return {
        "device": {"name": device},
        "requests": {
            "16": {
                "preparation_us": {"median": preparation, "low": 1.0, "high": 900.0},
                "step_us": {"median": step, "low": 1.0, "high": 900.0},
            }
        },
    }


@pytest.fixture
def write(tmp_path: Path):
    def write_one(name: str, record: dict[str, object]) -> str:
        path = tmp_path / name
        path.write_text(json.dumps(record))
        return str(path)

    return write_one


@pytest.mark.parametrize(
    ("new", "code"), [(60.0, 0), (100.0, 0), (115.0, 0), (116.0, 1), (200.0, 1)]
)
def test_growth_above_fifteen_percent_fails(write, capsys, new, code):
    stored = write("stored.json", a_record(100.0))

    found = main([write("new.json", a_record(new)), stored])

    assert found == code
    assert "requests/16/preparation_us" in capsys.readouterr().out


def test_the_limit_and_the_figures_can_be_chosen(write):
    new, stored = write("new.json", a_record(140.0)), write("stored.json", a_record(100.0))

    assert main([new, stored, "--most", "50"]) == 0
    assert main([new, stored, "--only", "step_us"]) == 0
    assert main([new, stored, "--only", "preparation"]) == 1


def test_a_figure_that_is_gone_fails(write, capsys):
    stored = write("stored.json", a_record(100.0))
    new = a_record(100.0)
    new["requests"] = {}

    code = main([write("new.json", new), stored])

    assert code == 1
    assert "missing" in capsys.readouterr().out


def test_records_of_different_devices_are_not_compared(write, capsys):
    stored = write("stored.json", a_record(100.0, device="another"))

    code = main([write("new.json", a_record(100.0)), stored])

    assert code == 2
    assert "another" in capsys.readouterr().out


def test_nothing_to_compare_is_no_success(write):
    path = write("one.json", a_record(100.0))

    assert main([path, path, "--only", "no such figure"]) == 2


def test_medians_are_found_in_lists_too():
    stored = {"exchange": [{"p50": {"median": 10.0}}, {"p50": {"median": 20.0}}]}

    changes = compare({"exchange": [{"p50": {"median": 10.0}}]}, stored)

    assert [(c.name, c.percent) for c in changes] == [
        ("exchange/0/p50", 0.0),
        ("exchange/1/p50", None),
    ]
