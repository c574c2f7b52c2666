"""The tour's check finds what is not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "core.py").write_text(
        "class Core:\n    def step(self): ...\n\ndef plan(): ...\n"
    )
    return tmp_path


def test_functions_and_methods_that_exist_are_counted(package: Path) -> None:
    tour = "1. `engine/core.py` `Core.step` and `engine/core.py` `plan`; see `engine/core.py`."

    assert load("tour").problems(tour, package) == ([], 2)


def test_a_stop_may_run_over_a_line_end(package: Path) -> None:
    assert load("tour").problems("`engine/core.py`\n   `Core.run`", package) == (
        ["engine/core.py has no Core.run"],
        1,
    )


def test_a_file_that_is_gone_is_named(package: Path) -> None:
    assert load("tour").problems("`engine/loop.py` `run`", package) == (
        ["there is no engine/loop.py"],
        0,
    )


def test_the_pinned_torch_is_found() -> None:
    environment = load("environment")

    assert environment.pinned("torch").split(".")[0] == "2"


def test_the_fingerprint_follows_the_extras() -> None:
    environment = load("environment")

    assert environment.fingerprint(["cpu"]) == environment.fingerprint(["cpu"])
    assert environment.fingerprint(["cpu"]) != environment.fingerprint(["cpu", "test"])
