"""DeepSeek-V4.1-Flash: its published config, and smaller models whose layers have its sizes.

`mini96` is what fits one GPU: the kinds of layers, widths, windows and lists of the release, fewer layers, experts
and n-grams.
"""

from __future__ import annotations

TEXT: dict[str, object] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 129280,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "moe_intermediate_size": 2304,
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-20,
    "sliding_window": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_vocab_size": 16000000,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
    "attention_bias": False,
    "tie_word_embeddings": False,
}

V41_FLASH: dict[str, object] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": TEXT,
}

MINI_LAYERS: dict[str, object] = {
    "num_hidden_layers": 10,
    "compress_ratios": [0] * 2 + [2] * 3 + [1] * 5 + [0] * 3,
    "kv_source_layer_ids": [2, 5],
    "index_source_layer_ids": [2, 5, 7],
    "candidate_source_layer_id": 5,
    "engram_layer_ids": [1, 3],
    "engram_num_embeddings": [6294996, 6302196],
    "engram_vocab_size": 262144,
    "dspark_target_layer_ids": [7, 8, 9],
}
"""Two layers of windows alone; of ratio 2 one maker and two readers; of ratio 1 a maker, one that chooses, three readers."""


def mini(experts: int = 96, **changes: object) -> dict[str, object]:
    """A config of ten layers of the release's sizes, with so many experts and other changes of its text part."""
    fewer = {"n_routed_experts": experts, "dspark_n_routed_experts": experts // 3}
    return {**V41_FLASH, "text_config": {**TEXT, **MINI_LAYERS, **fewer, **changes}}


def tiny() -> dict[str, object]:
    """The layers of `mini` in sizes a CPU runs at once; shows that the benchmark runs, and what Python takes."""
    return mini(
        8,
        vocab_size=1024,
        hidden_size=256,
        num_attention_heads=8,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=64,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        index_n_heads=8,
        index_head_dim=32,
        index_topk=64,
        engram_num_embeddings=[6090, 6296],
        engram_n_heads=2,
        engram_head_dim=32,
        engram_vocab_size=997,
        engram_compressed_vocab_size=700,
    )
