"""DeepSeek V4.1 and V4 models small enough for any test: configs, and weights that anybody can make from names.

The V4.1 configuration, its weights and its tokens are those of published golden numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tests.support.steps import a_build
from tests.support.tiny import VOCAB_TOKENS
from tokamak.core.weight import DenseWeight
from tokamak.layers.build import Build
from tokamak.layers.model import Model
from tokamak.models.deepseek_v4.config_v4_1 import V41Config
from tokamak.models.deepseek_v4.v4 import DeepseekV4
from tokamak.models.deepseek_v4.v4_1 import DeepseekV41
from tokamak.models.registry import find

COMPRESSED_IDS = 700

SMALL = {
    "vocab_size": VOCAB_TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [660],
    "engram_vocab_size": 100,
}
"""Changes that make the golden V4.1 config smaller, with the vocabulary of the other tiny models."""

YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}


WIDE = {
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 128,
    "index_head_dim": 128,
    "moe_intermediate_size": 128,
    "sliding_window": 128,
    "index_topk": 64,
}
"""Changes that give the golden V4.1 config the widths of published heads, which kernels may ask for."""


def v4_1_config(**changes: object) -> dict[str, object]:
    """A V4.1 config of ten layers with every mechanism on."""
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": 1024,
        "hidden_size": 256,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 64,
        "sliding_window": 8,
        "rms_norm_eps": 1e-20,
        "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4, 6],
        "index_source_layer_ids": [2, 4, 6, 8],
        "index_n_heads": 8,
        "index_head_dim": 32,
        "index_topk": 6,
        "candidate_source_layer_id": 6,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 1.0,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": YARN,
        "max_position_embeddings": 1048576,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 4],
        "engram_num_embeddings": [6090, 6296],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_vocab_size": 997,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": COMPRESSED_IDS,
        "attention_bias": False,
        "tie_word_embeddings": False,
        **changes,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "text_config": text,
    }


def v4_config(**changes: object) -> dict[str, object]:
    """A V4 config of five layers of all kinds, as published; heads and tables are small."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": VOCAB_TOKENS,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 24,
        "sliding_window": 8,
        "compress_ratios": [0, 4, 8, 4, 8, 0],
        "compress_rates": {"heavily_compressed_attention": 8},
        # Many heads, so that no two entries score the same.
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 5,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "num_hash_layers": 2,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 1.0,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": YARN,
        "max_position_embeddings": 1048576,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
        **changes,
    }


def named_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """The numbers a tensor of that published name has in golden models, float32."""
    numbers = np.random.default_rng(zlib.crc32(f"e{name}".encode())).standard_normal(shape)
    if name.endswith(("norm.weight", "q_weight", "k_weight", "_scale")):
        numbers = 1 + 0.1 * numbers
    elif name.endswith(("attn_sink", "_base")):
        numbers = 0.5 * numbers
    elif name.endswith("_fn"):
        numbers = 0.05 * numbers
    elif name.endswith(("gate.bias", "ape")):
        numbers = 0.1 * numbers
    elif not name.endswith("embed.weight"):
        numbers = numbers / np.sqrt(shape[-1])
    return torch.from_numpy(numbers.astype(np.float32))


def weights_of(config: Mapping[str, object]) -> dict[str, Tensor]:
    """Weights of a config by published name, those of tables of experts among them."""
    architectures = config["architectures"]
    assert isinstance(architectures, list)
    model = find(architectures[0]).from_config(config, a_build())
    assert isinstance(model, DeepseekV4 | DeepseekV41), f"{architectures[0]} is another family's"
    found: dict[str, Tensor] = {}
    experts = model.config.shared.experts
    for parameter, sources in model.weights().values():
        for name, shape in zip(sources, parameter.part_shapes, strict=True):
            found[name] = named_weight(name, shape)
            if name.endswith("tid2eid"):
                found[name] = found[name].new_tensor(range(shape[0])).long()[:, None]
                found[name] = (7 * found[name] + torch.arange(shape[1])) % experts
    return found


def load_named_weights(model: Model) -> None:
    """Fill a model with the numbers its published names stand for."""
    for parameter, sources in model.weights().values():
        shapes = parameter.part_shapes
        parameter.load(
            [
                DenseWeight(named_weight(name, shape))
                for name, shape in zip(sources, shapes, strict=True)
            ]
        )


def golden_tokens(count: int = 96) -> list[int]:
    """The tokens of the golden numbers."""
    return [(7 * at * at + 3 * at + 11) % 1024 for at in range(count)]


def tiny_compressed_ids(vocab_tokens: int = 1024) -> list[int]:
    """What the memories of the golden models call each token."""
    return [(token + 37) % COMPRESSED_IDS for token in range(vocab_tokens)]


def a_v4_1(
    build: Build | None = None, *, rounds_caches: bool = True, **changes: object
) -> DeepseekV41:
    """A golden V4.1 model, or a change of it."""
    config = V41Config.read(v4_1_config(**changes), "DeepseekV41ForCausalLM")
    if not rounds_caches:
        config = without_rounding(config)
    model = DeepseekV41(config, build or a_build())
    load_named_weights(model)
    model.take_compressed_ids(tiny_compressed_ids(config.shared.vocab_tokens))
    return model


def without_rounding(config: V41Config) -> V41Config:
    """The config of a model whose caches keep what is computed."""
    return replace(config, rounds_caches=False)


GOLDEN_ROWS: Mapping[bool, Mapping[int, tuple[list[float], int]]] = {
    True: {
        0: ([0.4156, -0.1196, -1.6808, 1.0370, 1.4530, -0.1564], 909),
        1: ([-0.4200, 0.3884, -0.2420, 0.1893, -0.1270, 1.1099], 906),
        8: ([0.0334, 0.4149, 0.0083, -0.5846, -0.8306, 1.1343], 655),
        31: ([-1.2824, 1.1974, 0.3129, 0.0422, 1.3397, -1.6171], 1020),
        63: ([0.1143, -1.7130, -0.0951, -0.5062, 0.8976, -0.3467], 220),
        95: ([-0.1581, 0.1095, 1.3244, 0.7304, 2.7471, 0.7155], 179),
    },
    False: {
        0: ([0.4412, -0.1296, -1.6879, 0.9978], 909),
        31: ([-1.8143, 1.5618, 0.5927, -0.3573], 1020),
        63: ([0.1465, -1.5391, 0.5443, -0.1995], 220),
        95: ([-0.6686, -0.8230, 1.3289, 0.1195], 327),
    },
}
"""With and without rounding, by row: the first scores, and the token with the highest."""
