"""What do DeepSeek V4 and V4.1 read of a config, and what do they refuse by name?"""

from __future__ import annotations

import pytest
import torch

from tests.support.steps import ModelDriver, a_build
from tests.support.tiny_v4 import SMALL, v4_1_config, v4_config
from tokamak.cache.groups import group_sub_caches
from tokamak.cache.layout import bytes_per_block
from tokamak.checkpoint.compressed_sizes import block_multiple, cache_token_numbers, ratios
from tokamak.errors import CheckpointError, UnsupportedModelError
from tokamak.layers.model import Parameter
from tokamak.models.deepseek_v4.config_v4 import V4Config
from tokamak.models.deepseek_v4.config_v4_1 import V41Config
from tokamak.models.deepseek_v4.v4 import DeepseekV4
from tokamak.models.deepseek_v4.v4_1 import DeepseekV41


def a_v4(**changes: object) -> V4Config:
    return V4Config.read(v4_config(**changes), "DeepseekV4ForCausalLM")


def a_v4_1(**changes: object) -> V41Config:
    return V41Config.read(v4_1_config(**changes), "DeepseekV41ForCausalLM")


def without(config: dict[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in config.items() if key != name}


READERS = {"v4": a_v4, "v4.1": a_v4_1}
every_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


def test_v4_1_knows_who_makes_entries_and_who_reads_them():
    config = a_v4_1()

    assert config.ratios == (0, 0, 2, 2, 2, 2, 1, 1, 1, 1)
    assert [config.source_of(layer, config.entry_sources) for layer in range(10)] == [
        -1, -1, 2, 2, 4, 4, 6, 6, 6, 6,
    ]  # fmt: skip
    assert config.source_of(9, config.index_sources) == 8


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ({}, ("window", "sparse", "heavy", "sparse", "heavy")),
        (
            {
                "compress_ratios": None,
                "layer_types": ["sliding_attention"] * 4 + ["heavily_compressed_attention"],
            },
            ("window", "window", "window", "window", "heavy"),
        ),
    ],
    ids=["ratios", "types"],
)
def test_v4_reads_kinds_of_layers_in_both_spellings(given, kinds):
    assert a_v4(**given).kinds == kinds


def test_v4_reads_who_hashes_tokens_in_both_spellings():
    types = ["hash_moe", "moe", "hash_moe", "moe", "moe"]

    assert a_v4().hashes == (True, True, False, False, False)
    assert a_v4(mlp_layer_types=types).hashes == (True, False, True, False, False)


def test_both_spellings_of_angles_are_the_same():
    nested = {
        "main": {"rope_type": "default", "rope_theta": 10000.0},
        "compress": {
            **v4_config()["rope_scaling"],
            "rope_theta": 160000.0,
            "attention_factor": 1.0,
        },
    }

    assert a_v4(rope_scaling=None, rope_parameters=nested).shared == a_v4().shared


def test_frequencies_of_published_numbers():
    config = a_v4_1(qk_rope_head_dim=64, head_dim=512)

    table = config.shared.entry_rope.table(2, torch.device("cpu"))

    angles = torch.atan2(table[1, 32:], table[1, :32])
    found = [angles[at].item() for at in (0, 1, 15, 16, 20, 24, 28, 31)]
    assert found == pytest.approx(
        [1.0, 6.876560e-1, 3.635539e-3, 2.265625e-3, 2.969778e-4, 1.953125e-5, 1.746928e-6, 5.680529e-7],
        rel=1e-5,
    )  # fmt: skip


@every_reader
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("num_key_value_heads", 8),
        ("n_shared_experts", 2),
        ("gate_temp", 0.5),
        ("final_logit_softcapping", 30.0),
    ],
)
def test_other_arithmetic_is_refused_by_name(read, name, value):
    with pytest.raises(UnsupportedModelError, match=name):
        read(**{name: value})


@every_reader
@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_other_angles_are_refused_by_name(read, kind):
    with pytest.raises(UnsupportedModelError, match=kind):
        read(rope_scaling={"type": kind, "factor": 2.0})


@every_reader
@pytest.mark.parametrize(
    "name",
    [
        "hidden_size",
        "head_dim",
        "q_lora_rank",
        "o_groups",
        "hc_mult",
        "hc_eps",
        "swiglu_limit",
        "index_topk",
    ],
)
def test_a_size_must_be_there(read, name):
    with pytest.raises(CheckpointError, match=name):
        read(**{name: None})


@every_reader
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"o_groups": 3}, "o_groups is 3"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok is 99"),
        ({"qk_rope_head_dim": 15}, "15 numbers"),
        ({"compress_ratios": [0, 2]}, "compress_ratios"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(read, changes, named):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_source_layer_ids": [4, 6]}, "layer 2 .* kv_source_layer_ids"),
        ({"kv_source_layer_ids": [2, 4]}, "layer 6 .* ratio 1, .* layer 4 of 2"),
        ({"index_source_layer_ids": [2, 8]}, "layer 6 .* index_source_layer_ids"),
        ({"candidate_source_layer_id": 7}, "candidate_source_layer_id is 7"),
        ({"candidate_source_layer_id": 4}, r"entries of layers \[4, 6\]"),
        ({"engram_num_embeddings": [6090, 6297]}, "layer 4 .* 6297 rows.* reach 6296"),
        ({"engram_vocab_size": 1009}, "layer 1 .* 6090 rows"),
        ({"engram_num_embeddings": [6090]}, "engram_num_embeddings is"),
        ({"engram_layer_ids": [1, 40]}, "engram_layer_ids is"),
    ],
)
def test_v4_1_refuses_layers_and_tables_that_do_not_fit(changes, named):
    with pytest.raises(CheckpointError, match=named):
        a_v4_1(**changes)


@pytest.mark.parametrize(
    ("read", "name", "value"),
    [
        (a_v4, "engram_layer_ids", [1]),
        (a_v4, "kv_source_layer_ids", [0]),
        (a_v4, "candidate_source_layer_id", 3),
        (a_v4_1, "num_hash_layers", 3),
        (a_v4_1, "mlp_layer_types", ["moe"] * 10),
        (a_v4_1, "layer_types", ["sliding_attention"] * 10),
    ],
)
def test_what_a_relative_has_is_refused_by_name(read, name, value):
    with pytest.raises(UnsupportedModelError, match=name):
        read(**{name: value})


@pytest.mark.parametrize(
    ("kind", "config"), [(DeepseekV4, v4_config), (DeepseekV41, v4_1_config)], ids=["v4", "v4.1"]
)
def test_a_context_beyond_the_trained_one_is_refused(kind, config):
    with pytest.raises(UnsupportedModelError, match="max_position_embeddings is 128"):
        kind.from_config(config(max_position_embeddings=128), a_build(max_model_len=129))


MODELS = {
    "v4": (DeepseekV4, v4_config()),
    "v4.1": (DeepseekV41, v4_1_config(**SMALL)),
}
every_model = pytest.mark.parametrize(("kind", "config"), MODELS.values(), ids=MODELS)


@every_model
def test_every_parameter_has_a_place_of_its_own(kind, config):
    model = kind.from_config(config, a_build())

    names = [name for _, sources in model.weights().values() for name in sources]

    assert len(set(names)) == len(names)
    assert all(isinstance(parameter, Parameter) for parameter, _ in model.weights().values())


@every_model
def test_drafters_and_what_reads_images_may_be_there(kind, config):
    model = kind.from_config(config, a_build())

    model.take_names(["mtp.0.norm.weight", "embed.weight"])

    assert "mtp.0.norm.weight" in model.optional_weights()
    assert "embed.weight" not in model.optional_weights()


@every_model
def test_random_weights_fill_a_model(kind, config):
    model = kind.from_config(config, a_build())
    generator = torch.Generator().manual_seed(1)
    for parameter, _ in model.weights().values():
        parameter.load(parameter.draw(generator))
    model.take_tokenizer(None)

    scores = ModelDriver(model, block_tokens=8).step({"only": [5, 6, 7]})["only"]

    assert torch.isfinite(scores).all()
    assert scores.std() > 0.1


def test_v4_1_keeps_entries_of_their_makers_alone():
    groups = group_sub_caches(DeepseekV41.from_config(v4_1_config(), a_build()).sub_caches())

    late = {group.name: group.late_tokens for group in groups if group.late_tokens}
    kept = {
        group.name: (
            group.stride_tokens,
            group.keep_tokens,
            {sub_cache.name: (sub_cache.layers, sub_cache.width) for sub_cache in group.sub_caches},
        )
        for group in groups
    }
    assert kept == {
        "window": (1, 8, {"window": ((0, 1, 2, 3, 4, 5), 64)}),
        "late_window": (1, 8, {"late_window": ((6, 7, 8, 9), 64)}),
        "entries_2": (2, 0, {"entries_2": ((2, 4), 64), "index_keys_2": ((2, 4), 32)}),
        "open_groups_2": (1, 2, {"open_groups_2": ((2, 4), 128)}),
        "entries_1": (1, 0, {"entries_1": ((6,), 64), "index_keys_1": ((6,), 32)}),
    }
    assert late == {"late_window": 1 + 7 * 4}


def test_late_layers_run_for_a_window_under_bounded_replay():
    model = DeepseekV41.from_config(v4_1_config(), a_build(bounded_replay=True))

    late = {group.name: group.late_tokens for group in group_sub_caches(model.sub_caches())}

    assert late["late_window"] == model.stages().late_tokens == 8


def test_v4_1_that_cannot_be_cut_keeps_one_window():
    # The memory in front of layer 7 needs more of a row than its streams.
    config = v4_1_config(engram_layer_ids=[1, 7])
    model = DeepseekV41.from_config(config, a_build())

    windows = {s.name: (s.layers, s.late_tokens) for s in model.sub_caches() if "window" in s.name}

    assert model.stages() is None
    assert windows == {"window": (tuple(range(10)), 0)}


def test_v4_keeps_what_overlapping_groups_are_folded_of_for_two_groups():
    groups = group_sub_caches(DeepseekV4.from_config(v4_config(), a_build()).sub_caches())

    kept = {
        sub_cache.name: (sub_cache.stride_tokens, sub_cache.keep_tokens)
        for group in groups
        for sub_cache in group.sub_caches
    }
    assert kept == {
        "window": (1, 8),
        "sparse_entries": (4, 0),
        "open_sparse_entries": (1, 8),
        "index_keys": (4, 0),
        "open_index_keys": (1, 8),
        "heavy_entries": (8, 0),
        "open_heavy_entries": (1, 8),
    }


def test_sizes_of_caches_are_estimated_from_the_config():
    text = v4_1_config()["text_config"]

    assert ratios(text) == (0, 0, 2, 2, 2, 2, 1, 1, 1, 1)
    assert (block_multiple(text), block_multiple(v4_config())) == (2, 8)
    # Ten window rows; of three makers their entries and keys, of two the rows these are folded of.
    assert cache_token_numbers(text, 64) == 10 * 64 + 2 * 48 + 96 + 2 * 4 * 64
    # Five window rows; of layers whose entries are chosen these and their keys, folded of two groups; of others of one.
    sparse = (32 + 16) // 4 + 2 * 2 * 2 * (32 + 16)
    heavy = 32 // 8 + 2 * 2 * 32
    assert cache_token_numbers(v4_config(), 32) == 5 * 32 + 2 * sparse + 2 * heavy
    assert ratios({"num_hidden_layers": 2}) == ()


def test_the_number_of_tokens_of_a_published_config_gives_its_tables():
    """DeepSeek-V4.1-Flash: the sizes of its two tables are sums of primes."""
    config = a_v4_1(
        num_hidden_layers=20,
        compress_ratios=[0] * 20,
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=None,
        engram_layer_ids=[1, 14],
        engram_num_embeddings=[384006168, 384016682],
        engram_n_heads=8,
        engram_vocab_size=16000000,
        engram_compressed_vocab_size=99092,
    )

    assert config.engram.primes[1][0][:3] == (16000057, 16000079, 16000081)
    assert config.engram.multipliers[14][0] == 67716810739261


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_estimate_covers_what_is_kept(kind, config, dtype):
    text = config.get("text_config", config)
    groups = group_sub_caches(kind.from_config(config, a_build(dtype)).sub_caches())

    estimate = cache_token_numbers(text, text["head_dim"]) * dtype.itemsize
    exact = bytes_per_block(groups, 16) / 16

    assert exact <= estimate <= 2 * exact
