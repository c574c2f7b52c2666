"""What do a checkpoint's files hold? Config and float32 tensors by Hugging Face name, for the oracle.

Written without `tokamak`, so that the oracle's weights are a second reading of the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

GGUF_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def read_weights(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """Read a folder with config.json, or a .gguf file."""
    return _read_gguf(path) if path.suffix == ".gguf" else _read_folder(path)


def _read_folder(path: Path) -> tuple[dict, dict[str, Tensor]]:
    weights: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        weights |= {name: tensor.float() for name, tensor in load_file(file).items()}
    config = json.loads((path / "config.json").read_text())
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    return config, weights


def _read_gguf(path: Path) -> tuple[dict, dict[str, Tensor]]:
    reader = gguf.GGUFReader(path)
    kind = reader.fields["general.architecture"].contents()
    names = {
        "hidden_size": "embedding_length", "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count", "rope_theta": "rope.freq_base",
        "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }  # fmt: skip
    fields = {ours: reader.fields.get(f"{kind}.{theirs}") for ours, theirs in names.items()}
    config = {"model_type": kind} | {n: f.contents() for n, f in fields.items() if f is not None}
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        numbers = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            weights[f"{GGUF_TOP[parts[0]]}.{parts[1]}"] = numbers
            continue
        if kind == "llama" and parts[2] in ("attn_q", "attn_k"):
            # llama.cpp rotates neighbours, so its converter interleaves the two halves of each head.
            heads = config["num_attention_heads" if parts[2] == "attn_q" else "num_key_value_heads"]
            rows = numbers.view(heads, -1, 2, *numbers.shape[1:])
            numbers = rows.transpose(1, 2).reshape(numbers.shape)
        weights[f"model.layers.{parts[1]}.{GGUF_NAMES[parts[2]]}.{parts[3]}"] = numbers
    return config, weights
