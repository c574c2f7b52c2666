"""Every option is a flag of its name, and flags reach the options model as text."""

from __future__ import annotations

import pytest

from tokamak.cli.flags import Parser, add_options, asked_options, read_options
from tokamak.config.options import EngineOptions, ServeOptions, option_names
from tokamak.errors import OptionError


def parsed(*arguments: str, options: type[EngineOptions] = ServeOptions) -> EngineOptions:
    parser = Parser(prog="tokamak test")
    add_options(parser, options)
    return read_options(parser.parse(list(arguments)), options)


def test_flags_have_the_names_of_options() -> None:
    parser = Parser(prog="tokamak test")
    add_options(parser, ServeOptions)

    shown = parser.format_help()

    for name in option_names(ServeOptions):
        assert f"--{name.replace('_', '-')}" in shown
        assert ServeOptions.model_fields[name].description is not None


def test_a_flag_wins_over_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKAMAK_MAX_NUM_SEQS", "4")
    monkeypatch.setenv("TOKAMAK_SEED", "5")

    options = parsed("--max-num-seqs", "8")

    assert (options.max_num_seqs, options.seed) == (8, 5)


def test_the_model_may_stand_alone_or_behind_its_flag() -> None:
    assert parsed("some/model").model == "some/model"
    assert parsed("--model", "some/model").model == "some/model"
    assert parsed("some/model", "--model", "some/model").model == "some/model"


def test_two_models_are_refused() -> None:
    with pytest.raises(OptionError, match=r"given twice: 'one' and --model 'two'"):
        parsed("one", "--model", "two")


def test_switches_have_two_flags() -> None:
    assert parsed("--no-enable-prefix-caching").enable_prefix_caching is False
    assert parsed("--enable-prefix-caching").enable_prefix_caching is True


def test_lists_may_be_repeated_or_joined() -> None:
    options = parsed("--served-model-name", "a,b", "--served-model-name", "c")

    assert options.served_model_name == ("a", "b", "c")


def test_a_wrong_value_names_its_flag() -> None:
    with pytest.raises(OptionError, match=r"port is 'x' \(from the flag --port\)"):
        parsed("--port", "x")


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(OptionError, match="takes no argument '--max-num-seq'"):
        parsed("--max-num-seq", "8")


def test_what_was_asked_anywhere_is_handed_on_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("config") / "tokamak.toml"
    path.write_text("block_size = 8\nport = 9000\n")
    monkeypatch.setenv("TOKAMAK_SEED", "5")

    options = parsed("m", "--config", str(path), "--dtype", "fp32", options=EngineOptions)

    assert asked_options(options) == {"block_size": 8, "seed": 5, "dtype": "float32"}
    assert EngineOptions(model="m", **asked_options(options)).block_size == 8
