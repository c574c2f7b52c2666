"""What transformers computes for a tiny config and its weights: the other reading of each family."""

from __future__ import annotations

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
)

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def their_scores(
    config: Mapping[str, object], weights: Mapping[str, Tensor], prompts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Scores of every position of each prompt on its own: [tokens, vocab] float32 each."""
    config_class, model_class = CLASSES[str(config["model_type"])]
    theirs = model_class(config_class(**config, attn_implementation="eager")).eval()
    given = dict(weights)
    if config["tie_word_embeddings"]:
        given["lm_head.weight"] = given["model.embed_tokens.weight"]
    theirs.load_state_dict(given, strict=True)
    with torch.inference_mode():
        return [theirs(torch.tensor([list(prompt)])).logits[0] for prompt in prompts]
