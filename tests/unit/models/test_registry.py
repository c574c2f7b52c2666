"""Is every architecture we name answered by a family that claims it, and any other refused?"""

from __future__ import annotations

import pytest

from tests.support.steps import a_build
from tests.support.tiny import llama_config, mistral_config, qwen3_config, qwen3_moe_config
from tokamak.errors import UnsupportedModelError
from tokamak.layers.model import Model
from tokamak.models.registry import FAMILIES, find


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_registered_architecture_finds_a_family_that_claims_it(architecture):
    assert architecture in find(architecture).architectures


def test_an_unknown_architecture_is_refused_with_those_there_are():
    with pytest.raises(UnsupportedModelError, match=r"'GPT2LMHeadModel'.*Qwen3ForCausalLM"):
        find("GPT2LMHeadModel")


@pytest.mark.parametrize(
    "config", [llama_config(), mistral_config(), qwen3_config(), qwen3_moe_config()]
)
def test_a_family_builds_a_model_from_a_config(config):
    family = find(config["architectures"][0])

    assert isinstance(family.from_config(config, a_build()), Model)
