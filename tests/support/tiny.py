"""Models small enough for any test: configs, seeded weights, and whole checkpoints on disk.

Weights are scaled so that the scores of different tokens lie well apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tokamak.quant.weights import fp8_weight

VOCAB_TOKENS = 320
END_OF_TEXT, START_OF_TURN, END_OF_TURN = 0, 1, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MERGED_WORDS = (
    "Ġthe", "Ġand", "Ġof", "Ġto", "Ġin", "Ġis", "Ġwhat", "Ġyou", "user", "assistant", "system",
    "Hello", "Ġworld", "ing", "Ġcapital", "The", "What", "Ġfrom",
)  # fmt: skip


def llama_config(**changes: object) -> dict[str, object]:
    """A Llama config of two layers, four query heads and two key heads, with an untied head."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_TOKENS,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": START_OF_TURN,
        "eos_token_id": END_OF_TURN,
        "torch_dtype": "float32",
        **changes,
    }


def mistral_config(**changes: object) -> dict[str, object]:
    """A Mistral config with a window of eight tokens."""
    kind = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
    return llama_config(**{**kind, **changes})


def qwen3_config(**changes: object) -> dict[str, object]:
    """A Qwen3 config with a tied head, and heads wider than the hidden size divided by their count."""
    kind = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 48,
        "head_dim": 24,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    return llama_config(**{**kind, **changes})


def qwen3_moe_config(**changes: object) -> dict[str, object]:
    """A Qwen3 config whose two layers have six experts, of which a token goes to two."""
    kind = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return qwen3_config(**{**kind, **changes})


def has_experts(config: Mapping[str, object], layer: int) -> bool:
    """Whether a layer of a config is one with experts."""
    every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    assert isinstance(every, int)
    assert isinstance(dense, list)
    return "num_experts" in config and layer not in dense and (layer + 1) % every == 0


def weight_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """The checkpoint tensors of a config, by Hugging Face name."""
    sizes = {name: value for name, value in config.items() if isinstance(value, int)}
    width, inner, head_dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q_rows = sizes["num_attention_heads"] * head_dim
    kv_rows = sizes["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (sizes["vocab_size"], width)
    for layer in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        attention = {"q": (q_rows, width), "k": (kv_rows, width), "v": (kv_rows, width)}
        for name, shape in {**attention, "o": (width, q_rows)}.items():
            shapes[f"{at}.self_attn.{name}_proj.weight"] = shape
            if config.get("attention_bias"):
                shapes[f"{at}.self_attn.{name}_proj.bias"] = shape[:1]
        if has_experts(config, layer):
            shapes[f"{at}.mlp.gate.weight"] = (sizes["num_experts"], width)
            for expert in range(sizes["num_experts"]):
                shapes |= mlp_shapes(
                    f"{at}.mlp.experts.{expert}", width, sizes["moe_intermediate_size"]
                )
        else:
            shapes |= mlp_shapes(f"{at}.mlp", width, inner, bias=bool(config.get("mlp_bias")))
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{name}.weight"] = (width,)
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            for name in ("q_norm", "k_norm"):
                shapes[f"{at}.self_attn.{name}.weight"] = (head_dim,)
    return shapes


def mlp_shapes(
    at: str, width: int, inner: int, *, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    """The tensors of one gated MLP."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in {
        "gate": (inner, width),
        "up": (inner, width),
        "down": (width, inner),
    }.items():
        shapes[f"{at}.{name}_proj.weight"] = shape
        if bias:
            shapes[f"{at}.{name}_proj.bias"] = shape[:1]
    return shapes


def tiny_weights(config: Mapping[str, object], seed: int = 0) -> dict[str, Tensor]:
    """Seeded float32 weights of a config: scores have a standard deviation of about 4."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in weight_shapes(config).items():
        numbers = torch.randn(shape, generator=generator)
        if "norm" in name:
            weights[name] = 1 + 0.2 * numbers
        elif name.endswith("bias"):
            weights[name] = 0.2 * numbers
        else:
            scale = 4.0 if name in ("lm_head.weight", "model.embed_tokens.weight") else 1.5
            weights[name] = numbers * scale * shape[-1] ** -0.5
    return weights


def tiny_tokenizer(vocab_tokens: int = VOCAB_TOKENS) -> Tokenizer:
    """A byte-level BPE of three special tokens, the 256 bytes, and merges of a few words.

    Raises:
        ValueError: `vocab_tokens` is not from 259 to what the words can fill.
    """
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    merges: list[tuple[str, str]] = []
    for word in MERGED_WORDS:
        for end in range(1, len(word)):
            if word[: end + 1] not in vocab and len(vocab) < vocab_tokens:
                merges.append((word[:end], word[end]))
                vocab[word[: end + 1]] = len(vocab)
    if len(vocab) != vocab_tokens:
        raise ValueError(f"{vocab_tokens} vocabulary tokens asked for, {len(vocab)} made")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def write_scaled_checkpoint(
    folder: Path, config: Mapping[str, object], *, block: tuple[int, int]
) -> Path:
    """Write a checkpoint whose projections are 8-bit numbers with a scale per block."""
    tensors = tiny_weights(config)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scaled = fp8_weight(tensors[name], block, powers_of_two=False)
        tensors[name] = scaled.codes
        tensors[name.removesuffix("weight") + "weight_scale_inv"] = scaled.scales
    write_checkpoint(folder, config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = {"quant_method": "fp8", "weight_block_size": [*block]}
    write_json(folder / "config.json", {**config, "quantization_config": said})
    return folder


def write_checkpoint(
    folder: Path,
    config: Mapping[str, object] | None = None,
    *,
    seed: int = 0,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Write a whole Hugging Face checkpoint: config, weights (in `shards` files), tokenizer, template."""
    config = llama_config() if config is None else config
    given = tiny_weights(config, seed) if weights is None else weights
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in given.items()}
    folder.mkdir(parents=True, exist_ok=True)
    stored = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    write_json(folder / "config.json", stored)
    write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    write_tokenizer(folder, chat_template)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    places: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = {name: tensors[name] for name in names[shard::shards]}
        save_file(mine, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(mine, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_json(folder / "model.safetensors.index.json", index)
    return folder


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[START_OF_TURN],
        "eos_token": SPECIAL_TOKENS[END_OF_TURN],
        "add_bos_token": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write one JSON object."""
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
