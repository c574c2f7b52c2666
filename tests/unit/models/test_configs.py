"""What do the families read of a config, and what do they refuse by name?"""

from __future__ import annotations

import logging

import pytest

from tests.support.tiny import llama_config, mistral_config, qwen3_config
from tokamak.errors import CheckpointError, UnsupportedModelError
from tokamak.models.llama.config import LlamaConfig
from tokamak.models.qwen3.config import Qwen3Config


def a_llama(**changes: object) -> LlamaConfig:
    config = llama_config(**changes)
    return LlamaConfig.read(config, "LlamaForCausalLM")


def a_mistral(**changes: object) -> LlamaConfig:
    return LlamaConfig.read(mistral_config(**changes), "MistralForCausalLM")


def a_qwen3(**changes: object) -> Qwen3Config:
    return Qwen3Config.read(qwen3_config(**changes), "Qwen3ForCausalLM")


def without(config: dict[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in config.items() if name not in names}


def test_sizes_are_read_into_our_words():
    config = a_llama(attention_bias=True)

    assert (config.vocab_tokens, config.width, config.inner_width) == (320, 64, 96)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert config.windows == (0, 0)
    assert config.attention_bias
    assert not config.mlp_bias


@pytest.mark.parametrize("name", ["head_dim", "num_key_value_heads", "rms_norm_eps", "hidden_act"])
def test_a_llama_field_with_a_default_may_be_missing_or_null(name):
    missing = LlamaConfig.read(without(llama_config(), name), "LlamaForCausalLM")

    assert a_llama(**{name: None}) == missing
    assert (missing.head_dim, missing.kv_heads) in ((16, 2), (16, 4))


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("read", [a_llama, a_mistral, a_qwen3])
def test_a_size_that_is_missing_is_named(read, name):
    with pytest.raises(CheckpointError, match=rf"{name} .*None.*whole number"):
        read(**{name: None})


@pytest.mark.parametrize("value", [0, -2, 2.5, "64", True, [64]])
def test_a_size_that_is_no_count_is_refused_with_its_value(value):
    with pytest.raises(CheckpointError, match="hidden_size"):
        a_llama(hidden_size=value)


def test_query_heads_that_key_heads_cannot_share_are_refused():
    with pytest.raises(
        CheckpointError, match=r"num_attention_heads is 4.*num_key_value_heads is 3"
    ):
        a_llama(num_key_value_heads=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("rope_interleaved", True),
        ("final_logit_softcapping", 30.0),
        ("embedding_multiplier", 12.0),
        ("logit_scale", 0.5),
        ("num_local_experts", 8),
        ("clip_qkv", 6.0),
        ("is_encoder_decoder", True),
        ("layer_types", ["full_attention", "linear_attention"]),
    ],
)
@pytest.mark.parametrize("read", [a_llama, a_mistral, a_qwen3])
def test_a_field_that_changes_the_arithmetic_is_refused_by_name(read, name, value):
    with pytest.raises(UnsupportedModelError, match=name):
        read(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "swish"),
        ("rope_interleaved", False),
        ("final_logit_softcapping", None),
        ("embedding_multiplier", 1.0),
        ("num_experts", 0),
    ],
)
@pytest.mark.parametrize("read", [a_llama, a_mistral, a_qwen3])
def test_the_same_field_with_a_value_that_changes_nothing_is_read_over(read, name, value):
    assert read(**{name: value}) == read()


def test_a_field_nobody_knows_is_logged_by_name(caplog):
    caplog.set_level(logging.INFO)

    a_llama(training_flavour="vanilla", _name_or_path="somewhere")

    assert "training_flavour" in caplog.text
    assert "somewhere" not in caplog.text
    assert "hidden_size" not in caplog.text


def test_a_mistral_window_is_the_fields_value_none_for_null_and_4096_where_missing():
    missing = LlamaConfig.read(without(mistral_config(), "sliding_window"), "MistralForCausalLM")

    assert a_mistral(sliding_window=16).windows == (16, 16)
    assert a_mistral(sliding_window=None).windows == (0, 0)
    assert missing.windows == (4096, 4096)


def test_a_llama_window_is_honoured_where_a_config_states_one():
    assert a_llama(sliding_window=16).windows == (16, 16)


def test_layer_types_say_which_layers_have_the_window():
    types = ["sliding_attention", "full_attention"]

    assert a_mistral(sliding_window=16, layer_types=types).windows == (16, 0)


def test_layer_types_for_another_count_of_layers_are_refused():
    with pytest.raises(CheckpointError, match=r"layer_types.*2 names"):
        a_mistral(layer_types=["full_attention"] * 3)


def test_a_qwen3_window_starts_after_max_window_layers():
    used = {"use_sliding_window": True, "sliding_window": 16}

    assert a_qwen3(**used, max_window_layers=1).windows == (0, 16)
    assert a_qwen3(**used, max_window_layers=0).windows == (16, 16)
    assert a_qwen3(**used).windows == (0, 0)
    assert a_qwen3(sliding_window=16, max_window_layers=0).windows == (0, 0)


def test_missing_fields_of_qwen3_have_that_familys_defaults():
    config = without(qwen3_config(num_attention_heads=32), "num_key_value_heads", "head_dim")

    read = Qwen3Config.read(without(config, "tie_word_embeddings"), "Qwen3ForCausalLM")

    assert (read.kv_heads, read.head_dim, read.tied_head) == (32, 128, False)
