"""What transformers computes for a tiny config and its weights: the other reading of each family."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def stacked_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights as transformers holds them: all experts of a layer as one tensor, gate above up."""
    given: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in weights.items():
        found = EXPERT.fullmatch(name)
        if found is None:
            given[name] = tensor
        else:
            layer, expert, part = found.groups()
            experts.setdefault(layer, {}).setdefault(int(expert), {})[part] = tensor
    for layer, parts in experts.items():
        ordered = [parts[expert] for expert in range(len(parts))]
        pairs = [torch.cat([part["gate"], part["up"]]) for part in ordered]
        given[f"{layer}.gate_up_proj"] = torch.stack(pairs)
        given[f"{layer}.down_proj"] = torch.stack([part["down"] for part in ordered])
    return given


def their_scores(
    config: Mapping[str, object], weights: Mapping[str, Tensor], prompts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Scores of every position of each prompt on its own: [tokens, vocab] float32 each."""
    config_class, model_class = CLASSES[str(config["model_type"])]
    theirs = model_class(config_class(**config, attn_implementation="eager")).eval()
    given = stacked_experts(weights)
    if config["tie_word_embeddings"]:
        given["lm_head.weight"] = given["model.embed_tokens.weight"]
    theirs.load_state_dict(given, strict=True)
    with torch.inference_mode():
        return [theirs(torch.tensor([list(prompt)])).logits[0] for prompt in prompts]
