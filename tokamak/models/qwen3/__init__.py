"""The Qwen3 decoders, dense (Qwen3ForCausalLM) and with experts (Qwen3MoeForCausalLM)."""
