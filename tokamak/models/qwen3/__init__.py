"""The Qwen3 decoder without experts (Qwen3ForCausalLM)."""
