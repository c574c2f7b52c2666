"""Do the models declare all they keep and all they need, and nothing twice?"""

from __future__ import annotations

import pytest
import torch

from tests.support.steps import ModelDriver, a_build
from tests.support.tiny import (
    llama_config,
    mistral_config,
    qwen3_config,
    qwen3_moe_config,
    weight_shapes,
)
from tokamak.cache.groups import group_sub_caches
from tokamak.layers.model import Model, Parameter
from tokamak.models.registry import find

CONFIGS = {
    "llama": llama_config(),
    "llama-tied": llama_config(tie_word_embeddings=True),
    "llama-biased": llama_config(attention_bias=True, mlp_bias=True),
    "mistral": mistral_config(),
    "qwen3": qwen3_config(),
    "qwen3-biased": qwen3_config(attention_bias=True, tie_word_embeddings=False),
    "qwen3-moe": qwen3_moe_config(),
    "qwen3-moe-dense-first": qwen3_moe_config(mlp_only_layers=[0]),
}


def a_bare_model(config: dict[str, object], **changes: object) -> Model:
    build = a_build(**changes)
    return find(config["architectures"][0]).from_config(config, build)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_tensor_of_a_checkpoint_has_one_place_of_its_shape(config):
    model = a_bare_model(config)

    placed = [
        (name, shape)
        for parameter, sources in model.weights().values()
        for name, shape in zip(sources, parameter.part_shapes, strict=True)
    ]

    assert len(dict(placed)) == len(placed)
    assert dict(placed) == weight_shapes(config)
    assert all(isinstance(parameter, Parameter) for parameter, _ in model.weights().values())


def test_a_copy_of_a_tied_head_may_be_there_and_an_untied_head_must():
    tied, untied = a_bare_model(CONFIGS["llama-tied"]), a_bare_model(CONFIGS["llama"])

    assert "lm_head.weight" in tied.optional_weights()
    assert "lm_head.weight" not in untied.optional_weights()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_keys_and_values_form_one_group_named_keys(config):
    groups = group_sub_caches(a_bare_model(config).sub_caches())

    assert [group.name for group in groups] == ["keys"]


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")]
)
def test_caches_have_the_models_dtype_and_a_row_per_key_head(dtype, name):
    keys, values = a_bare_model(qwen3_config(), dtype=dtype).sub_caches()

    assert (keys.name, values.name) == ("keys", "values")
    assert (keys.heads, keys.width, keys.dtype, keys.layers) == (2, 24, name, (0, 1))
    assert values.heads == keys.heads


def test_only_the_window_is_kept_where_every_layer_has_one():
    windowed = a_bare_model(mistral_config(sliding_window=8))
    mixed = a_bare_model(
        mistral_config(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    )

    assert [kind.keep_tokens for kind in windowed.sub_caches()] == [8, 8]
    assert [kind.keep_tokens for kind in mixed.sub_caches()] == [0, 0]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_random_weights_fill_a_model_and_repeat_with_their_seed(config):
    def scores(seed: int) -> torch.Tensor:
        model = a_bare_model(config)
        generator = torch.Generator().manual_seed(seed)
        for parameter, _ in model.weights().values():
            parameter.load(parameter.draw(generator))
        return ModelDriver(model).step({"only": [5, 6, 7]})["only"]

    assert torch.isfinite(scores(1)).all()
    assert torch.equal(scores(1), scores(1))
    assert not torch.equal(scores(1), scores(2))


def test_a_build_records_which_backend_each_op_got():
    build = a_build()

    find("LlamaForCausalLM").from_config(llama_config(), build)

    assert set(build.choices) == {
        "rms_norm",
        "add_residual",
        "embed",
        "add_rms_norm",
        "rotate_and_cache",
        "paged_attention",
        "silu_mul",
    }
