"""What a GGUF file's metadata says, in the words of a Hugging Face config.json, tensor names included.

In: an open GGUF file. Out: a config dict that a model family reads as if it came from config.json, and
Hugging Face names for the file's tensors.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from tokamak.checkpoint.gguf import GgufArray, GgufFile
from tokamak.errors import CheckpointError, UnsupportedModelError

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
"""By general.architecture: model_type and architecture. Mistral and SmolLM2 are written as llama."""

INTERLEAVED_ARCHITECTURES = ("llama",)
"""Files whose query and key rows alternate between the halves of each rotary pair."""

OUTSIDE_LAYERS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

ROPE_FACTORS = "rope_freqs.weight"
"""One divisor per rotary frequency; part of the config, not a weight."""

LLAMA3_BAND = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What every published Llama 3 with scaled positions was trained with."""

_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hugging_face_name(stored: str) -> str:
    """The Hugging Face name of a tensor; names not in the table stay as they are."""
    in_layer = _LAYER_NAME.fullmatch(stored)
    if in_layer is not None:
        layer, part, kind = in_layer.groups()
        return f"model.layers.{layer}.{IN_LAYERS[part]}.{kind}" if part in IN_LAYERS else stored
    part, _, kind = stored.rpartition(".")
    return f"{OUTSIDE_LAYERS[part]}.{kind}" if part in OUTSIDE_LAYERS else stored


def interleaved_heads(config: dict[str, Any], name: str) -> int:
    """Heads of a tensor whose rows must be put back in order when it is read, or 0."""
    if config["model_type"] not in INTERLEAVED_ARCHITECTURES:
        return 0
    if ".self_attn.q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".self_attn.k_proj." in name else 0


def read_config(file: GgufFile) -> dict[str, Any]:
    """The config of the model in `file`.

    Raises:
        UnsupportedModelError: an architecture, or a feature of one, that is not supported.
        CheckpointError: a value is missing, of the wrong type or contradicts the tensors.
    """
    architecture = file.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} holds a model of architecture {architecture!r}, which is not supported",
            hint=f"supported in GGUF files: {', '.join(ARCHITECTURES)}",
        )
    if file.get("split.count", int, 1) > 1:
        raise UnsupportedModelError(
            f"{file.path} is one of {file.metadata['split.count']} parts of a split GGUF file",
            hint="join the parts with `llama-gguf-split --merge` first",
        )
    model_type, family = ARCHITECTURES[architecture]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} has no tensor token_embd.weight")
    heads = _count(file, f"{architecture}.attention.head_count")
    width = _count(file, f"{architecture}.embedding_length")
    head_dim = _count(file, f"{architecture}.attention.key_length", width // heads)
    if _count(file, f"{architecture}.expert_count", 0):
        raise UnsupportedModelError(
            f"{file.path} is a mixture of experts of architecture {architecture!r}, which is not "
            "supported"
        )
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [family],
        "hidden_size": width,
        "intermediate_size": _count(file, f"{architecture}.feed_forward_length"),
        "num_hidden_layers": _count(file, f"{architecture}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _count(file, f"{architecture}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _number(file, f"{architecture}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _count(file, f"{architecture}.context_length"),
        "rope_theta": _number(file, f"{architecture}.rope.freq_base", 10_000.0),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }
    if architecture == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    window_tokens = _count(file, f"{architecture}.attention.sliding_window", 0)
    if window_tokens:
        config["sliding_window"] = window_tokens
        if architecture == "qwen3":
            config |= {"use_sliding_window": True, "max_window_layers": 0}
    rotary_dim = _count(file, f"{architecture}.rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    scaling = _rope_scaling(file, architecture, rotary_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    for ours, theirs in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
        token_id = file.get(f"tokenizer.ggml.{theirs}_token_id", int)
        if token_id is not None:
            config[ours] = token_id
    return config


def _rope_scaling(file: GgufFile, architecture: str, rotary_dim: int) -> dict[str, Any] | None:
    """The rope_scaling of the config, from the file's keys or its table of factors."""
    prefix = f"{architecture}.rope.scaling"
    kind = file.get(f"{prefix}.type", str, "none")
    if ROPE_FACTORS in file.tensors:
        theta = _number(file, f"{architecture}.rope.freq_base", 10_000.0)
        return _llama3_scaling(file, theta, rotary_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path} scales positions by {kind!r}, which is not supported",
            hint="supported: none, linear, yarn, and Llama 3's table of factors",
        )
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": _number(file, f"{prefix}.factor", 1.0),
    }
    original = _count(file, f"{prefix}.original_context_length", 0)
    if original and kind == "yarn":
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(file: GgufFile, theta: float, rotary_dim: int) -> dict[str, Any]:
    """The parameters of Llama 3's scaling whose factors are those in the file.

    The file keeps only the outcome: 1 for fast frequencies, `factor` for slow ones, a ramp between.
    """
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.format.name != "F32" or tensor.shape != (rotary_dim // 2,):
        raise CheckpointError(
            f"{ROPE_FACTORS} of {file.path} is {tensor.format.name} {list(tensor.shape)}; expected F32 "
            f"[{rotary_dim // 2}]"
        )
    factors = np.frombuffer(file.tensor_bytes(tensor), "<f4").astype(np.float64)
    factor = float(factors.max())
    frequencies = theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    turns = LLAMA3_BAND["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = LLAMA3_BAND["low_freq_factor"], LLAMA3_BAND["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / (kept + (1 - kept) / factor), rtol=1e-4):
        raise UnsupportedModelError(
            f"{ROPE_FACTORS} of {file.path} scales positions in a way that is not Llama 3's",
            hint="supported: low_freq_factor 1, high_freq_factor 4, 8192 original positions",
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_BAND}


def _count(file: GgufFile, key: str, default: int | None = None) -> int:
    if isinstance(file.metadata.get(key), GgufArray):
        raise UnsupportedModelError(
            f"{key} of {file.path} differs by layer, which is not supported"
        )
    value = file.get(key, int, default)
    if value is None or value < 0 or (value == 0 and default is None):
        raise CheckpointError(f"{key} of {file.path} is {value!r}; expected a positive count")
    return value


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.get(key, (float, int), default)
    if value is None or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"{key} of {file.path} is {value!r}; expected a positive number")
    # Written as float32; the shortest decimal that means the same is what the config said.
    return float(str(np.float32(value)))
