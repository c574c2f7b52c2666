"""The examples run as they are, on a tiny model and against a server."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.live_server import serving
from tests.support.scripted_engine import says
from tests.support.tiny import write_checkpoint

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


def test_chat_answers_twice(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    load("chat").main(model)

    assert capsys.readouterr().out.count("\n") >= 2


def test_batch_continues_four_prompts(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    load("batch").main(model)

    assert len(capsys.readouterr().out.splitlines()) == 4


def test_client_prints_the_stream(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(says("Tokyo.")) as server:
        load("client").main(server.url)

    assert capsys.readouterr().out == "Tokyo.\n"


@pytest.mark.weights
def test_structured_parses_what_a_real_model_says(capsys: pytest.CaptureFixture[str]) -> None:
    load("structured").main()

    assert "'name'" in capsys.readouterr().out


def test_every_example_is_run() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}

    assert names == {"chat", "batch", "client", "structured"}
