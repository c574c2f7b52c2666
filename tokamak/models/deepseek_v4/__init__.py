"""The DeepSeek V4 decoders: V4 (DeepseekV4ForCausalLM) and V4.1 (DeepseekV41ForCausalLM)."""
