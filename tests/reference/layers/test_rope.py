"""Are our rotary tables those of transformers, and are the kinds we lack refused by name?"""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.support.tiny import llama_config
from tokamak.errors import CheckpointError, UnsupportedModelError
from tokamak.layers.config_fields import ConfigFields
from tokamak.layers.rope import Rope, read_rope

CPU = torch.device("cpu")

KINDS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "old-spelling": {"type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-given-amplitude": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7},
    "yarn-mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.3, "mscale_all_dim": 0.9},
    "yarn-betas": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2},
    "yarn-untruncated": {"rope_type": "yarn", "factor": 8.0, "truncate": False},
    "yarn-no-stretch": {"rope_type": "yarn", "factor": 1.0},
}


def a_rope(head_dim: int = 64, **changes: object) -> Rope:
    return read_rope(ConfigFields(llama_config(**changes), "LlamaForCausalLM"), head_dim)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_a_scaled_table_is_that_of_transformers(kind, theta):
    scaling = KINDS[kind]
    config = LlamaConfig(
        head_dim=64, max_position_embeddings=512, rope_theta=theta, rope_scaling=dict(scaling)
    )
    name = config.rope_parameters["rope_type"]

    table = a_rope(rope_theta=theta, rope_scaling=scaling).table(200, CPU)

    frequencies, amplitude = ROPE_INIT_FUNCTIONS[name](config, CPU)
    angles = torch.arange(200, dtype=torch.float64)[:, None] * frequencies.double()
    expected = torch.cat([angles.cos(), angles.sin()], dim=-1) * amplitude
    torch.testing.assert_close(table.double(), expected, rtol=0, atol=1e-4)


def test_a_plain_table_has_cosines_then_sines():
    table = a_rope(head_dim=8, rope_theta=100.0).table(3, CPU)

    frequencies = [100.0 ** (-2 * pair / 8) for pair in range(4)]
    expected = [
        [math.cos(at * f) for f in frequencies] + [math.sin(at * f) for f in frequencies]
        for at in range(3)
    ]
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, torch.tensor(expected))


def test_late_positions_keep_the_precision_of_float64():
    table = a_rope(head_dim=8, rope_theta=10000.0).table(100_001, CPU)

    assert table[100_000, 0].item() == pytest.approx(math.cos(100_000), abs=1e-7)


def test_a_part_of_the_head_is_rotated_where_the_config_says_so():
    rope = a_rope(head_dim=16, partial_rotary_factor=0.5)

    assert rope.rotary_dim == 8
    assert rope.table(4, CPU).shape == (4, 8)
    assert torch.equal(rope.table(4, CPU), a_rope(head_dim=8).table(4, CPU))


def test_the_new_and_the_old_spelling_of_a_config_mean_the_same():
    old = a_rope(rope_theta=123.0, rope_scaling={"type": "linear", "factor": 4.0})
    new = a_rope(
        rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 123.0}
    )

    assert old == new


def test_dynamic_scaling_is_refused_beyond_the_trained_context():
    rope = a_rope(max_position_embeddings=100, rope_scaling=KINDS["dynamic"])

    rope.table(100, CPU)
    with pytest.raises(UnsupportedModelError, match=r"'dynamic'.*100 tokens.*101.*max_model_len"):
        rope.table(101, CPU)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope type 'longrope'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "rope type 'mrope'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 3.0}}, "alpha"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ],
)
def test_a_rope_we_do_not_know_is_refused_by_name(changes, words):
    with pytest.raises(UnsupportedModelError, match=words):
        a_rope(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"rope_type": "linear"}}, "factor.*None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor.*'4'"),
        ({"rope_scaling": [1.0]}, "rope_parameters"),
        ({"rope_theta": -1.0}, "rope_theta.*-1.0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor.*1.5"),
    ],
)
def test_a_broken_rope_is_told_by_field_and_value(changes, words):
    with pytest.raises(CheckpointError, match=words):
        a_rope(**changes)
