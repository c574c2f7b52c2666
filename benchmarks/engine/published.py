"""Which models are measured with random weights? Their published configs, and figures to compare with.

Times in milliseconds, prompts of 1024 tokens and 128 new ones, one H200, bfloat16: vLLM's, and what we aim at.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Published:
    """A model's config, and by batch: vLLM's times and the time of a token we aim at."""

    config: dict[str, object]
    vllm_tpot_ms: dict[int, float] = field(default_factory=dict)
    vllm_ttft_ms: dict[int, float] = field(default_factory=dict)
    target_tpot_ms: dict[int, float] = field(default_factory=dict)


QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 320,
}
"""Shows that the benchmark runs; its times mean nothing."""

EIGHT_BITS = {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
}
"""What makers of fp8 checkpoints add to a config."""

BATCHES = (1, 8, 32, 128, 256)

MODELS = {
    "qwen3-0.6b": Published(
        QWEN3_06B,
        vllm_tpot_ms=dict(zip(BATCHES, (2.310, 2.851, 3.609, 6.336, 9.712), strict=True)),
        vllm_ttft_ms=dict(zip(BATCHES, (28.1, 36.0, 139.8, 559.6, 916.0), strict=True)),
        target_tpot_ms=dict(zip(BATCHES, (0.90, 1.25, 2.1, 5.2, 9.2), strict=True)),
    ),
    "llama-3-8b": Published(
        LLAMA_3_8B,
        vllm_tpot_ms=dict(zip(BATCHES, (4.913, 5.219, 6.237, 10.679, 18.241), strict=True)),
        vllm_ttft_ms=dict(zip(BATCHES, (26.3, 186.9, 759.7, 3023.0, 6008.0), strict=True)),
        target_tpot_ms=dict(zip(BATCHES, (4.25, 4.6, 5.6, 9.6, 16.0), strict=True)),
    ),
    "qwen3-30b-a3b": Published(
        QWEN3_30B_A3B,
        vllm_tpot_ms=dict(zip(BATCHES[:4], (4.133, 9.203, 16.198, 21.329), strict=True)),
        vllm_ttft_ms=dict(zip(BATCHES[:4], (86.2, 119.5, 473.5, 1901.0), strict=True)),
        target_tpot_ms=dict(zip(BATCHES[:4], (2.5, 7.4, 15.0, 19.5), strict=True)),
    ),
    "llama-3-8b-fp8": Published(LLAMA_3_8B | EIGHT_BITS),
    "qwen3-30b-a3b-fp8": Published(QWEN3_30B_A3B | EIGHT_BITS),
    "tiny": Published(TINY),
}
