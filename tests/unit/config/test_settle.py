"""Options, device facts and model facts become a config without "auto", or one line that says why not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamak.config.engine import EngineConfig, ModelFacts
from tokamak.config.options import EngineOptions, ServeOptions
from tokamak.config.settle import check_pool, settle_engine, settle_server
from tokamak.config.settle_cache import cache_block_bytes
from tokamak.device.facts import DeviceFacts
from tokamak.errors import OptionError

GIB = 1024**3

FACTS = DeviceFacts(
    vendor="cpu",
    arch="x86_64",
    name="a CPU",
    cores=2,
    memory_bytes=16 * GIB,
    features=frozenset({"avx2", "fma"}),
    libraries=frozenset(),
)

SMALL = ModelFacts(
    architecture="LlamaForCausalLM",
    vocab_tokens=49152,
    max_position_tokens=8192,
    stored_dtype="Q4_1",
    weight_bytes=98_000_000,
    parameters=134_515_008,
    cache_token_numbers=2 * 30 * 3 * 64,
)


def settled(
    *, facts: DeviceFacts = FACTS, model: ModelFacts = SMALL, **options: object
) -> EngineConfig:
    return settle_engine(EngineOptions(**options), facts, model, Path("/models/small.gguf"))


def reason(config: EngineConfig, name: str) -> str:
    return next(line.why for line in config.reasons if line.field == name)


def test_every_auto_becomes_a_value_with_a_reason() -> None:
    config = settled()

    assert config.model.max_model_len == 8192
    assert config.scheduler.max_num_seqs == 32
    assert config.kernels.threads == 2
    automatic = {
        name for name, field in EngineOptions.model_fields.items() if field.default == "auto"
    } - {"load_format"}
    assert automatic <= {line.field for line in config.reasons}
    assert all(line.why and line.value != "auto" for line in config.reasons)


def test_what_was_asked_for_is_kept() -> None:
    config = settled(
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=8,
        kv_cache_memory_bytes="64MiB",
        threads=1,
        dtype="bf16",
        kernels="rms_norm=reference",
        served_model_name="a,b",
        enable_prefix_caching=False,
        scheduling_policy="priority",
        bounded_replay=True,
    )

    assert config.model.bounded_replay
    assert config.model.max_model_len == 512
    assert config.model.dtype == "bfloat16"
    assert config.model.served_names == ("a", "b")
    assert (config.cache.block_tokens, config.cache.arena_bytes) == (8, 64 * 1024**2)
    assert not config.cache.prefix_caching
    assert config.scheduler.policy == "priority"
    assert config.kernels.prefer == (("rms_norm", "reference"),)
    assert reason(config, "max_model_len") == "asked for"


def test_the_model_is_served_under_the_name_it_was_asked_by() -> None:
    assert settled().model.served_names == ("smollm2-135m",)


@pytest.mark.parametrize(
    ("features", "dtype"),
    [
        ({"avx2"}, "float32"),
        ({"avx512f", "avx512_vnni"}, "float32"),
        ({"avx512f", "avx512_bf16"}, "bfloat16"),
        ({"amx_bf16"}, "bfloat16"),
        ({"asimd", "bf16"}, "bfloat16"),
    ],
)
def test_the_arithmetic_follows_the_units_of_the_cpu(features: set[str], dtype: str) -> None:
    facts = dataclasses.replace(FACTS, features=frozenset(features))

    assert settled(facts=facts).model.dtype == dtype


def test_a_small_cache_shortens_the_longest_request() -> None:
    config = settled(kv_cache_memory_bytes="64MiB", dtype="fp32")

    assert config.model.max_model_len < 8192
    assert config.model.max_model_len * 2 * 30 * 3 * 64 * 4 <= 64 * 1024**2
    assert "cache" in reason(config, "max_model_len")


def test_a_large_model_leaves_less_room_for_the_cache() -> None:
    large = dataclasses.replace(SMALL, parameters=1_900_000_000, weight_bytes=1_900_000_000)

    config = settled(model=large)

    assert config.cache.arena_bytes < 8 * GIB - 4 * 1_900_000_000 + 1


def test_a_cache_is_never_larger_than_all_requests_can_fill() -> None:
    config = settled(max_num_seqs=1, max_model_len=160, dtype="fp32")

    assert config.cache.arena_bytes == 11 * 16 * (2 * 30 * 3 * 64) * 4


def test_a_memory_share_below_the_weights_is_refused_with_a_share_that_works() -> None:
    with pytest.raises(OptionError) as caught:
        settled(memory_fraction=0.01)

    assert "memory_fraction is 0.01" in str(caught.value)
    assert "\n" not in str(caught.value)
    works = float(str(caught.value).split("memory_fraction=")[1].split(" ")[0])
    assert settled(memory_fraction=works).model.max_model_len >= 16


def test_a_model_larger_than_memory_says_what_else_helps() -> None:
    huge = dataclasses.replace(SMALL, parameters=70_000_000_000)

    with pytest.raises(OptionError, match="smaller model"):
        settled(model=huge)


@pytest.mark.parametrize(
    ("options", "named", "works"),
    [
        (
            {"max_num_batched_tokens": 8},
            ("max_num_batched_tokens is 8", "block_size 16"),
            {"max_num_batched_tokens": 16},
        ),
        (
            {"max_num_batched_tokens": 16, "max_num_seqs": 20},
            ("max_num_batched_tokens is 16", "max_num_seqs 20"),
            {"max_num_batched_tokens": 20, "max_num_seqs": 20},
        ),
        (
            {"max_model_len": 9000},
            ("max_model_len is 9000", "8192 positions"),
            {"max_model_len": 8192},
        ),
        (
            {"max_waiting_tokens": 100},
            ("max_waiting_tokens is 100", "max_model_len 8192"),
            {"max_waiting_tokens": 8192},
        ),
        (
            {"num_blocks_override": 100, "kv_cache_memory_bytes": 10**9},
            ("num_blocks_override is 100", "kv_cache_memory_bytes is 1000000000"),
            {"num_blocks_override": 100},
        ),
        (
            {"kernels": "rms_norm=a,rms_norm=b"},
            ("rms_norm", "a and b"),
            {"kernels": "rms_norm=a"},
        ),
    ],
)
def test_settings_that_cannot_be_met_are_one_line_and_the_hint_works(
    options: dict[str, object], named: tuple[str, str], works: dict[str, object]
) -> None:
    with pytest.raises(OptionError) as caught:
        settled(**options)

    assert all(part in str(caught.value) for part in named), str(caught.value)
    assert "hint:" in str(caught.value)
    assert "\n" not in str(caught.value)
    settled(**works)


def test_a_context_larger_than_the_pool_is_refused_with_two_values_that_work() -> None:
    with pytest.raises(OptionError) as caught:
        settled(max_model_len=8000, kv_cache_memory_bytes="32MiB")

    message = str(caught.value)
    assert "max_model_len is 8000, but kv_cache_memory_bytes 32 MiB holds" in message
    shorter, larger = (
        re.search(rf"{name}=([0-9]+(?:MiB)?)", message)
        for name in ("max_model_len", "kv_cache_memory_bytes")
    )
    assert shorter is not None
    assert larger is not None
    settled(max_model_len=shorter[1], kv_cache_memory_bytes="32MiB")
    settled(max_model_len=8000, kv_cache_memory_bytes=larger[1])


def test_a_block_count_that_is_too_small_is_named() -> None:
    with pytest.raises(OptionError, match=r"num_blocks_override 10 .*num_blocks_override=101"):
        settled(max_model_len=1600, num_blocks_override=10)

    assert settled(max_model_len=1600, num_blocks_override=101).cache.blocks == 101


def test_the_pool_of_a_built_model_is_checked_too() -> None:
    unknown = dataclasses.replace(SMALL, cache_token_numbers=0)
    config = settled(model=unknown, max_model_len=1600, kv_cache_memory_bytes="64MiB")

    check_pool(config, 100)
    with pytest.raises(OptionError, match=r"holds 160 tokens \(10 blocks of 16\)"):
        check_pool(config, 10)
    with pytest.raises(OptionError, match="use kv_cache_memory_bytes="):
        check_pool(config, 0)


def test_a_missing_chat_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"chat_template is .*none\.jinja"):
        settled(chat_template=str(tmp_path / "none.jinja"))


def test_a_server_listens_on_a_socket_or_a_port(tmp_path: Path) -> None:
    socket = str(tmp_path / "tokamak.sock")

    with pytest.raises(OptionError, match=r"uds is .* and port is 8001"):
        settle_server(ServeOptions(uds=socket, port=8001))

    assert settle_server(ServeOptions(uds=socket)).uds == socket


def test_a_socket_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is no folder"):
        settle_server(ServeOptions(uds=str(tmp_path / "none" / "tokamak.sock")))


@given(
    memory_gib=st.integers(1, 512),
    parameters=st.integers(10**6, 10**11),
    numbers=st.integers(0, 10**6),
    positions=st.integers(16, 10**6),
    fraction=st.floats(0.01, 1.0),
    dtype=st.sampled_from(["auto", "fp32", "bf16"]),
)
def test_a_settled_cache_always_fits_the_memory_and_one_longest_request(
    memory_gib: int, parameters: int, numbers: int, positions: int, fraction: float, dtype: str
) -> None:
    facts = dataclasses.replace(FACTS, memory_bytes=memory_gib * GIB)
    model = dataclasses.replace(
        SMALL,
        parameters=parameters,
        cache_token_numbers=numbers,
        max_position_tokens=positions,
    )
    try:
        config = settled(facts=facts, model=model, memory_fraction=fraction, dtype=dtype)
    except OptionError:
        return

    number_bytes = 4 if config.model.dtype == "float32" else 2
    block_bytes = config.cache.block_tokens * numbers * number_bytes
    held = parameters * number_bytes + config.cache.arena_bytes
    assert held <= memory_gib * GIB * fraction
    assert 1 <= config.model.max_model_len <= positions
    if block_bytes:
        check_pool(config, config.cache.arena_bytes // block_bytes - 1)


@pytest.mark.parametrize("spelled", ["fp8", "fp8_e4m3"])
def test_a_cache_in_fp8_holds_twice_the_tokens_in_the_same_bytes(spelled: str) -> None:
    sizes = {"dtype": "bf16", "kv_cache_memory_bytes": "64MiB"}
    own, fp8 = settled(**sizes), settled(**sizes, kv_cache_dtype=spelled)

    assert (own.cache.dtype, fp8.cache.dtype) == ("bfloat16", "fp8")
    assert fp8.cache.arena_bytes == own.cache.arena_bytes
    own_blocks, blocks = (
        64 * 1024**2 // cache_block_bytes(SMALL, config.cache.dtype, 16) for config in (own, fp8)
    )
    assert blocks - 2 * own_blocks in (0, 1)
    assert (reason(own, "kv_cache_dtype"), reason(fp8, "kv_cache_dtype")) == (
        "as dtype",
        "asked for",
    )


@pytest.mark.parametrize("asked", ["fp8_e5m2", "int8", "float32"])
def test_an_unknown_format_of_the_cache_is_refused_by_name(asked: str) -> None:
    with pytest.raises(OptionError, match=f"kv_cache_dtype is '{asked}'; it must be .*'fp8'"):
        settled(kv_cache_dtype=asked)
