"""The Llama decoder (LlamaForCausalLM: Llama 2 and 3, SmolLM2; MistralForCausalLM)."""
