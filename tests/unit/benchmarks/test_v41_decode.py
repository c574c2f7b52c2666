"""Are figures of the V4.1 benchmark those of its model, and is the floor what a step must read?"""

from __future__ import annotations

from math import prod

import pytest
import torch

from benchmarks.engine.published_v4_1 import V41_FLASH, mini, tiny
from benchmarks.engine.v41_bytes import experts_form, loaded_bytes, step_bytes
from benchmarks.engine.v41_decode import arguments, table
from tests.support.steps import a_build
from tokamak.core.weight import DenseWeight
from tokamak.layers.plain import Product
from tokamak.models.deepseek_v4.config_v4_1 import V41Config
from tokamak.models.deepseek_v4.v4_1 import DeepseekV41

DRAFTER = 3 * (33 * 3 * 5120 * 2304 + 126.6e6) + 2 * 129280 * 256
"""Three stages of experts and attention, and two tables, in `mini96`, which are not built here."""


def read(config):
    return V41Config.read(config, "DeepseekV41ForCausalLM")


def numbers(model):
    return sum(prod(shape) for each, _ in model.weights().values() for shape in each.part_shapes)


def multiplied_away(model):
    """Numbers of parts that are kept as their product with another."""
    parameters = [parameter for parameter, _ in model.weights().values()]
    return sum(prod(each.part_shapes[1]) for each in parameters if isinstance(each, Product))


@pytest.fixture
def tiny_model():
    # In a form that holds each number once: others, which machines may choose, hold some more than once or padded.
    model = DeepseekV41.from_config(tiny(), a_build(prefer={"linear": "dense", "head": "dense"}))
    for parameter, _ in model.weights().values():
        parameter.load([DenseWeight(torch.zeros(shape)) for shape in parameter.part_shapes])
    return model


def test_the_mini_model_has_the_stated_size_and_the_kinds_of_layers_of_the_release():
    model = DeepseekV41.from_config(mini(), a_build())

    assert numbers(model) + DRAFTER == pytest.approx(44.5e9, rel=0.005)
    assert model.config.ratios == (0, 0, 2, 2, 2, 1, 1, 1, 1, 1)
    small, large = model.config.shared, read(V41_FLASH).shared
    assert (small.width, small.heads, small.window_tokens) == (large.width, large.heads, large.window_tokens)  # fmt: skip


def test_every_loaded_byte_is_counted_once(tiny_model):
    loaded = loaded_bytes(tiny_model)

    assert sum(loaded.values()) == 4 * (numbers(tiny_model) - multiplied_away(tiny_model))
    assert loaded["experts"] == 4 * 10 * 8 * 3 * 256 * 64
    assert loaded["tables"] == 4 * (1024 * 256 + (6090 + 6296) * 32)
    assert experts_form(tiny_model) == "widened to 4 bytes"


def test_the_floor_counts_what_four_requests_of_64k_tokens_read():
    loaded = {"experts": 96_000, "tables": 5, "others": 700}

    found = step_bytes(read(mini()), loaded, requests=4, context=65536, itemsize=2)

    # Of 96 experts a row meets 6: four rows meet 1 - (90 / 96)^4 of them. The second layer that chooses keeps to blocks.
    assert found == {
        "weights": 700,
        "experts": round(96_000 * (1 - (90 / 96) ** 4)),
        "windows": 4 * 10 * 128 * 512 * 2,
        "entries": 4 * 8 * 512 * 512 * 2,
        "index keys": 4 * (32768 + 65536 + 16384) * 128 * 2,
    }


def test_lengths_are_the_protocol_unless_asked_otherwise():
    usual, small = arguments([]), arguments(["--tiny", "--prompt", "99"])

    assert (usual.prompt, usual.new, usual.requests, usual.chunk) == (65536, 512, 4, 8192)
    assert usual.contexts == [8192, 65536, 262144]
    assert (small.prompt, small.contexts) == (99, [256, 1024])


def test_the_table_shows_steps_beside_their_floor():
    figures = {
        "model": "mini96", "dtype": "bfloat16", "experts": "4 bits", "layers": {"window alone": 2, "choose": 1},
        "memory_bytes_a_token": 1920, "requests": 4, "prompt_tokens": 65536,
        "decode": {
            "step_us": 3000.0, "floor_us": 1500.0, "times_the_floor": 2.0, "tokens_a_second": 1333.3,
            "host_us": {"stage": 40.0, "launch": 90.0}, "preparation_us": 40.0, "gpu_idle_us": 34.2,
        },
        "prefill": [{"context": 8192, "seconds": 1.0, "tokens_a_second": 8192.0}],
    }  # fmt: skip

    lines = table(figures).splitlines()

    assert lines[0] == "mini96 in bfloat16, experts 4 bits; layers: 2 window alone, 1 choose"
    assert "step 3000 us, floor 1500 us (2.00 times), 1333.3 tokens/s" in lines[2]
    assert lines[3] == "host: 40 us to prepare; stage 40 launch 90; GPU idle 34 us a step"
    assert lines[-1].split() == ["8192", "8192.0"]
