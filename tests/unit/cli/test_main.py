"""A command line finds its command; what goes wrong is one line and an exit status."""

from __future__ import annotations

import sys

import pytest

import tokamak
from tokamak.cli import main, model
from tokamak.errors import CheckpointError, OptionError


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    status = main.run(["--version"])

    assert (status, capsys.readouterr().out) == (0, f"tokamak {tokamak.__version__}\n")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status = main.run(["--help"])

    assert status == 0
    shown = capsys.readouterr().out
    assert all(f"    {name} " in shown for name in main.COMMANDS)


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status = main.run(["sreve"])

    assert status == 2
    assert capsys.readouterr().err.splitlines() == [
        "tokamak: error: there is no command 'sreve'; the commands are chat, serve, bench, doctor, plan, model"
    ]


@pytest.mark.parametrize(
    ("error", "status"),
    [(OptionError("port is 1", hint="use 2"), 2), (CheckpointError("a file\nis short"), 1)],
)
def test_an_error_is_one_line_and_a_status(
    error: Exception,
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str, *, progress: bool) -> None:
        raise error

    monkeypatch.setattr(model, "resolve_model", fail)

    assert main.run(["model", "fetch"]) == status
    shown = capsys.readouterr().err
    assert shown == f"tokamak: error: {' '.join(str(error).split())}\n"


def test_fetching_prints_the_path(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "resolve_model", lambda name, *, progress: f"/cache/{name}")

    assert main.run(["model", "fetch", "some/model"]) == 0
    assert capsys.readouterr().out == "/cache/some/model\n"


def test_an_unknown_flag_is_named_with_the_closest_one(capsys: pytest.CaptureFixture[str]) -> None:
    status = main.run(["doctor", "--max-modle-len", "5"])

    assert status == 2
    assert capsys.readouterr().err == (
        "tokamak: error: tokamak doctor takes no argument '--max-modle-len' "
        "(hint: did you mean --max-model-len?)\n"
    )


def test_a_flag_without_its_value_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status = main.run(["doctor", "--max-model-len"])

    assert status == 2
    assert "--max-model-len: expected one argument" in capsys.readouterr().err


@pytest.mark.parametrize("command", list(main.COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.run([command, "--help"])

    assert ended.value.code == 0
    assert f"tokamak {command}" in capsys.readouterr().out


def test_main_exits_with_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tokamak", "nothing"])

    with pytest.raises(SystemExit) as ended:
        main.main()

    assert ended.value.code == 2
