"""What do the families read of a config, and what do they refuse by name?"""

from __future__ import annotations

import logging

import pytest

from tests.support.tiny import llama_config, mistral_config, qwen3_config, qwen3_moe_config
from tokamak.errors import CheckpointError, UnsupportedModelError
from tokamak.models.llama.config import LlamaConfig
from tokamak.models.qwen3.config import Qwen3Config, Qwen3MoeConfig


def a_llama(**changes: object) -> LlamaConfig:
    config = llama_config(**changes)
    return LlamaConfig.read(config, "LlamaForCausalLM")


def a_mistral(**changes: object) -> LlamaConfig:
    return LlamaConfig.read(mistral_config(**changes), "MistralForCausalLM")


def a_qwen3(**changes: object) -> Qwen3Config:
    return Qwen3Config.read(qwen3_config(**changes), "Qwen3ForCausalLM")


def a_qwen3_moe(**changes: object) -> Qwen3MoeConfig:
    return Qwen3MoeConfig.read(qwen3_moe_config(**changes), "Qwen3MoeForCausalLM")


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
@pytest.mark.parametrize("read", [a_llama, a_mistral, a_qwen3, a_qwen3_moe])
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


def test_experts_are_read_into_our_words():
    config = a_qwen3_moe()

    assert (config.experts, config.chosen_experts, config.expert_width) == (6, 2, 40)
    assert config.renormalise
    assert config.has_experts == (True, True)
    assert (config.dense.width, config.dense.inner_width, config.dense.head_dim) == (48, 96, 24)


def test_newer_files_call_the_count_of_experts_local():
    config = without(qwen3_moe_config(num_local_experts=6), "num_experts")

    assert Qwen3MoeConfig.read(config, "Qwen3MoeForCausalLM") == a_qwen3_moe()


def test_two_counts_of_experts_are_refused_with_both():
    with pytest.raises(CheckpointError, match=r"num_experts is 6 and num_local_experts is 8"):
        a_qwen3_moe(num_local_experts=8)


def test_more_choices_than_experts_are_refused_with_both_counts():
    with pytest.raises(CheckpointError, match=r"num_experts_per_tok is 7 and num_experts is 6"):
        a_qwen3_moe(num_experts_per_tok=7)


@pytest.mark.parametrize(
    ("changes", "has_experts"),
    [
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [1, 3]}, (True, False, True, False)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (False, True, False, False)),
        ({"mlp_only_layers": None}, (True, True, True, True)),
    ],
)
def test_which_layers_have_experts_follows_from_step_and_list(changes, has_experts):
    assert a_qwen3_moe(num_hidden_layers=4, **changes).has_experts == has_experts


@pytest.mark.parametrize("value", [3, ["0"], [True], {"0": 1}])
def test_a_list_of_dense_layers_that_is_none_is_refused_with_its_value(value):
    with pytest.raises(CheckpointError, match="mlp_only_layers"):
        a_qwen3_moe(mlp_only_layers=value)


def test_missing_fields_of_qwen3_with_experts_have_that_familys_defaults():
    config = without(
        qwen3_moe_config(num_attention_heads=4, hidden_size=96),
        *("num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok"),
        *("moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
    )

    read = Qwen3MoeConfig.read(config, "Qwen3MoeForCausalLM")

    assert (read.dense.kv_heads, read.dense.head_dim) == (4, 24)
    assert (read.experts, read.chosen_experts, read.expert_width) == (128, 8, 768)
    assert not read.renormalise
    assert read.has_experts == (True, True)


def test_a_window_of_qwen3_with_experts_is_that_of_every_layer():
    used = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}

    assert a_qwen3_moe(**used).dense.windows == (16, 16)
    assert a_qwen3_moe(sliding_window=16).dense.windows == (0, 0)
