"""Is the choice between forms made from the measured times, once, and kept?"""

import json

import pytest
import torch

from tokamak.device.facts import cpu_facts
from tokamak.ops.linear import measure
from tokamak.ops.linear.forms import DenseLinear
from tokamak.ops.linear.measure import PROBE_ROWS, choose_forms, pick


def test_one_form_wins_everywhere():
    choice = pick({"a": [1, 2, 4, 10], "b": [2, 3, 5, 11]})

    assert (choice.few, choice.many, choice.border_rows) == ("a", "a", 0)


def test_a_second_form_joins_where_many_rows_are_much_faster():
    choice = pick({"codes": [1, 2, 9, 40], "units": [3, 4, 5, 10]})

    assert (choice.few, choice.many, choice.border_rows) == ("codes", "units", PROBE_ROWS[1])
    assert "codes 1.00/2.00/9.00/40.00" in choice.why


def test_a_second_form_is_not_worth_its_memory_for_a_little():
    choice = pick({"codes": [1, 2, 5, 11], "units": [3, 4, 5, 10]})

    assert choice.few == choice.many == "codes"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "PROBE_SHAPE", (64, 64))
    monkeypatch.setattr(measure, "EVICT_NUMBERS", 64)
    return tmp_path


def counting(calls):
    def make(weight):
        calls.append(weight)
        return DenseLinear(weight.dense(torch.float32))

    return make


def test_forms_are_measured_once_and_remembered(folder):
    calls = []
    makers = {"a": counting(calls), "b": counting(calls)}

    first = choose_forms(makers, "q4", dtype=torch.float32, facts=cpu_facts())
    second = choose_forms(makers, "q4", dtype=torch.float32, facts=cpu_facts())

    assert len(calls) == 2
    assert first == second


def test_a_broken_memory_is_measured_anew(folder):
    makers = {"a": counting([]), "b": counting([])}
    path = folder / "tokamak" / "kernels" / "linear-forms.json"
    path.parent.mkdir(parents=True)
    path.write_text("{ not json")

    choose_forms(makers, "dense", dtype=torch.float32, facts=cpu_facts())

    (times,) = json.loads(path.read_text()).values()
    assert set(times) == {"a", "b"}


def test_a_single_form_is_not_measured(folder):
    choice = choose_forms({"only": counting([])}, "q8", dtype=torch.float32, facts=cpu_facts())

    assert choice.few == "only"
    assert not list(folder.iterdir())
