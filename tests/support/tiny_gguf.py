"""Tiny models as .gguf files, written by the gguf library as llama.cpp's converter would lay them out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, TokenType
from torch import Tensor

from tests.support.oracle_files import GGUF_NAMES, GGUF_TOP
from tests.support.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_tokenizer, tiny_weights

N = TypeVar("N", int, float)

COUNTS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}


def write_gguf(
    path: Path,
    config: Mapping[str, object],
    *,
    weights: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    format: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """Write a config, weights (matrices in `format`), the tiny tokenizer and the template to one file."""
    kind = str(config["model_type"])
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, kind)
    for ours, theirs in COUNTS.items():
        writer.add_uint32(f"{kind}.{theirs}", _number(config, ours, int))
    writer.add_uint32(f"{kind}.attention.value_length", _number(config, "head_dim", int))
    writer.add_uint32(f"{kind}.rope.dimension_count", _number(config, "head_dim", int))
    writer.add_float32(f"{kind}.rope.freq_base", _number(config, "rope_theta", float))
    writer.add_float32(
        f"{kind}.attention.layer_norm_rms_epsilon", _number(config, "rms_norm_eps", float)
    )
    _add_tokenizer(writer)
    for name, tensor in (tiny_weights(config, seed) if weights is None else weights).items():
        stored, numbers = _stored(name, tensor.numpy(), config)
        kept = format if numbers.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quantize(numbers, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored(name: str, numbers: np.ndarray, config: Mapping[str, object]) -> tuple[str, np.ndarray]:
    """A tensor under llama.cpp's name, query and key rows in its order."""
    top = {ours: theirs for theirs, ours in GGUF_TOP.items()}
    module, _, suffix = name.rpartition(".")
    if module in top:
        return f"{top[module]}.{suffix}", numbers
    _, _, layer, part = module.split(".", 3)
    stored = {ours: theirs for theirs, ours in GGUF_NAMES.items()}[part]
    if config["model_type"] == "llama" and stored in ("attn_q", "attn_k"):
        heads = "num_attention_heads" if stored == "attn_q" else "num_key_value_heads"
        halves = numbers.reshape(_number(config, heads, int), 2, -1, *numbers.shape[1:])
        numbers = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(numbers.shape))
    return f"blk.{layer}.{stored}.{suffix}", numbers


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    stored = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in stored["merges"]])
    writer.add_bos_token_id(SPECIAL_TOKENS.index("<|im_start|>"))
    writer.add_eos_token_id(SPECIAL_TOKENS.index("<|im_end|>"))
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _number(config: Mapping[str, object], name: str, kind: type[N]) -> N:
    value = config[name]
    assert isinstance(value, kind), f"{name} is {value!r}"
    return value
