"""One name per option in Python, flags, environment and TOML; one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokamak.config.options import (
    EngineOptions,
    ServeOptions,
    option_group,
    option_names,
    read_config_file,
)
from tokamak.errors import OptionError


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("TOKAMAK_"):
            monkeypatch.delenv(name)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokamak.toml"
    path.write_text(
        'max_num_seqs = 3\nmax_model_len = 300\nseed = 30\nport = 9001\nkernels = ["a=b"]\n'
    )
    return path


def test_an_argument_wins_over_the_environment_over_the_file_over_the_default(
    monkeypatch: pytest.MonkeyPatch, config_file: Path
) -> None:
    monkeypatch.setenv("TOKAMAK_MAX_MODEL_LEN", "200")
    monkeypatch.setenv("TOKAMAK_SEED", "20")

    options = EngineOptions(config=str(config_file), seed=10)

    assert (options.seed, options.max_model_len, options.max_num_seqs) == (10, 200, 3)
    assert options.max_num_batched_tokens == "auto"


def test_the_config_file_can_be_named_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, config_file: Path
) -> None:
    monkeypatch.setenv("TOKAMAK_CONFIG", str(config_file))

    options = ServeOptions()

    assert (options.port, options.kernels) == (9001, ("a=b",))


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GiB", 2 * 1024**3), ("512MB", 512_000_000), ("1.5k", 1500), ("4096", 4096), (7, 7)],
)
def test_bytes_may_be_written_with_a_unit(text: object, count: int) -> None:
    options = EngineOptions(kv_cache_memory_bytes=text)

    assert options.kv_cache_memory_bytes == count


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [("fp32", "float32"), ("bf16", "bfloat16"), ("float32", "float32"), ("auto", "auto")],
)
def test_dtypes_have_short_spellings(spelled: str, meant: str) -> None:
    assert EngineOptions(dtype=spelled).dtype == meant


@pytest.mark.parametrize("given", ["a,b", ["a", "b"], ("a", "b")])
def test_lists_may_be_written_with_commas(given: object) -> None:
    assert EngineOptions(served_model_name=given).served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ("1,2, 8", (1, 2, 8)),
        ("64", (64,)),
        (64, (64,)),
        ([8, 1], (8, 1)),
        ("", ()),
        ([], ()),
        ("auto", "auto"),
    ],
    ids=str,
)
def test_graph_sizes_are_counts_with_commas_and_an_empty_text_is_none(
    given: object, sizes: object
) -> None:
    assert EngineOptions(req_graph_sizes=given).req_graph_sizes == sizes


def test_graph_sizes_can_be_named_by_the_environment_and_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tokamak.toml"
    path.write_text("token_graph_sizes = []\n")
    monkeypatch.setenv("TOKAMAK_REQ_GRAPH_SIZES", "1,4")

    options = EngineOptions(config=str(path))

    assert (options.req_graph_sizes, options.token_graph_sizes) == ((1, 4), ())


def test_lists_in_the_environment_are_written_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKAMAK_API_KEY", "one, two")

    assert ServeOptions().api_key == ("one", "two")


def test_an_unknown_argument_is_named_with_the_closest_option() -> None:
    with pytest.raises(
        OptionError, match=r"no option 'max_modle_len' .*did you mean max_model_len"
    ):
        EngineOptions(max_modle_len=5)


def test_an_unknown_variable_is_named_with_the_closest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKAMAK_MAX_NUM_SEQ", "5")

    with pytest.raises(
        OptionError, match=r"TOKAMAK_MAX_NUM_SEQ,.*did you mean TOKAMAK_MAX_NUM_SEQS"
    ):
        EngineOptions()


def test_an_unknown_key_of_the_file_is_named_with_file_and_closest_option(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("block_sice = 16\n")

    with pytest.raises(OptionError, match=r"bad\.toml has 'block_sice'.*did you mean block_size"):
        EngineOptions(config=str(path))


def test_a_server_option_in_a_shared_file_is_welcome_to_an_engine(config_file: Path) -> None:
    options = EngineOptions(config=str(config_file))

    assert not hasattr(options, "port")


def test_a_file_that_is_not_toml_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("seed : 5\n")

    with pytest.raises(OptionError, match=r"bad\.toml is not TOML"):
        read_config_file(str(path))


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        EngineOptions(config=str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_model_len": "abc"}, "max_model_len is 'abc'; it must be 'auto' or an integer"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be 'auto' or at least 1"),
        ({"memory_fraction": 2}, "memory_fraction is 2; it must be at most 1.0"),
        ({"dtype": "fp16"}, "dtype is 'fp16'; it must be 'auto', 'float32' or 'bfloat16'"),
        ({"device": "tpu"}, "device is 'tpu'; it must be 'auto', 'cpu' or 'cuda'"),
        ({"kernels": "rms_norm"}, "kernels is 'rms_norm'; it must be pairs of op=backend"),
        (
            {"enable_prefix_caching": "maybe"},
            "enable_prefix_caching is 'maybe'; it must be true or false",
        ),
        ({"kv_cache_memory_bytes": "lots"}, "it must be a number of bytes, such as 2GiB"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        (
            {"req_graph_sizes": "1,many"},
            "req_graph_sizes is '1,many'; it must be auto, or counts such as 1,2,4",
        ),
        ({"verify_graphs_rate": 1.5}, "verify_graphs_rate is 1.5; it must be at most 1.0"),
        (
            {"graphs": "always"},
            "graphs is 'always'; it must be 'auto', 'startup', 'serving', 'on-demand' or 'off'",
        ),
    ],
)
def test_a_wrong_value_is_one_line_with_option_value_and_what_is_expected(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        EngineOptions(**given)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_value_tells_where_it_came_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("port = 99999\n")
    monkeypatch.setenv("TOKAMAK_THREADS", "many")

    with pytest.raises(OptionError) as caught:
        ServeOptions(config=str(path), block_size="x", _from="flags")

    assert "block_size is 'x' (from the flag --block-size)" in str(caught.value)
    assert "threads is 'many' (from the variable TOKAMAK_THREADS)" in str(caught.value)
    assert f"port is 99999 (from the file {path})" in str(caught.value)


def test_keys_are_never_shown() -> None:
    options = ServeOptions(api_key="secret-key")

    with pytest.raises(OptionError) as caught:
        ServeOptions(api_key=[{"secret-key": 1}])

    assert "secret-key" not in repr(options)
    assert "secret-key" not in str(caught.value)


def test_options_do_not_thaw() -> None:
    options = EngineOptions()

    with pytest.raises(Exception, match="frozen"):
        options.seed = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_every_option_has_help_and_a_group() -> None:
    groups = {"model", "cache", "scheduler", "kernels", "graphs", "server"}
    for name in option_names(ServeOptions):
        field = ServeOptions.model_fields[name]

        assert field.description, name
        assert option_group(field) in groups, name
