"""Where do tables of n-grams lie, what do they count as, and when is there no place for them?"""

from dataclasses import replace

import pytest

from tests.support.configs import CPU, GIB, GPU, a_config
from tokamak.config.engine import ModelFacts
from tokamak.errors import OptionError

BACKBONE, TABLES = 20_000_000_000, 24_000_000_000


def a_model(tables: int = TABLES) -> ModelFacts:
    """A model with tables in 8 bits of so many numbers, and other weights in 16 bits."""
    return ModelFacts(
        architecture="DeepseekV41ForCausalLM",
        vocab_tokens=129280,
        max_position_tokens=4096,
        stored_dtype="bfloat16",
        weight_bytes=2 * BACKBONE + tables + tables // 32,
        parameters=BACKBONE + tables,
        table_parameters=tables,
        table_bytes=tables + tables // 32,
        cache_token_numbers=1600,
    )


HELD = TABLES + TABLES // 32
LARGE_CPU = replace(CPU, memory_bytes=200 * GIB)


@pytest.mark.parametrize(
    ("facts", "tables", "options", "place", "on_host"),
    [
        pytest.param(GPU, TABLES, {}, "device", False, id="a GPU with room"),
        pytest.param(GPU, 5 * TABLES, {}, "host", True, id="a GPU without room"),
        pytest.param(GPU, TABLES, {"engram_tables": "host"}, "host", True, id="a GPU, asked for"),
        pytest.param(GPU, 5 * TABLES, {"load_format": "random"}, "host", True, id="a GPU, random"),
        pytest.param(LARGE_CPU, TABLES, {}, "host", True, id="a CPU maps the file"),
        pytest.param(LARGE_CPU, TABLES, {"engram_tables": "device"}, "device", False, id="a CPU"),
        pytest.param(LARGE_CPU, TABLES, {"load_format": "random"}, "device", False, id="no file"),
        pytest.param(GPU, 0, {}, "device", False, id="no tables"),
    ],
)
def test_tables_lie_on_the_device_if_the_cache_keeps_half_of_the_room(
    facts, tables, options, place, on_host
):
    config = a_config(facts=facts, model=a_model(tables), dtype="bf16", **options)

    held = tables + tables // 32
    (line,) = [line for line in config.reasons if line.field == "engram_tables"]
    assert (config.model.tables, line.value) == (place, place)
    assert config.model.host_bytes == (held if on_host else 0)
    assert config.model.weight_bytes == 2 * BACKBONE + (0 if on_host else held)


def test_mapped_tables_need_no_memory_of_a_cpu():
    config = a_config(facts=replace(CPU, memory_bytes=100 * GIB), model=a_model(10 * TABLES), dtype="bf16")  # fmt: skip

    assert config.model.host_bytes > 200 * GIB


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engram_tables": "host"}, "engram_tables is host, .* take 46.1 GiB: .* 0.9 .* 32 GiB"),
        ({}, r"engram_tables is auto, .* 32 GiB .* more than half of the .* GiB that the device"),
    ],
)
def test_tables_that_have_no_place_are_refused(options, message):
    facts = replace(GPU, memory_bytes=100 * GIB, host_bytes=32 * GIB)

    with pytest.raises(OptionError, match=message):
        a_config(facts=facts, model=a_model(2 * TABLES), dtype="bf16", **options)


def test_random_tables_of_a_cpu_must_fit_its_memory():
    with pytest.raises(OptionError, match=r"the weights take 267\.8 GiB"):
        a_config(facts=LARGE_CPU, model=a_model(10 * TABLES), dtype="bf16", load_format="random")
