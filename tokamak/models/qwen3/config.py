"""What the Qwen3 decoder reads of a checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokamak.errors import CheckpointError
from tokamak.layers.config_fields import ConfigFields
from tokamak.layers.rope import Rope, read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config:
    """A Qwen3 decoder's sizes and choices."""

    vocab_tokens: int
    width: int
    inner_width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    windows: tuple[int, ...]
    """By layer: how many newest positions a query sees, 0 for all."""
    tied_head: bool
    attention_bias: bool

    @classmethod
    def read(cls, config: Mapping[str, object], architecture: str) -> Qwen3Config:
        """Read a Hugging Face config; missing fields get the architecture's defaults.

        Raises:
            UnsupportedModelError: a field asks for arithmetic we do not have.
            CheckpointError: a field is missing, of the wrong type or does not fit another.
        """
        fields = ConfigFields(config, architecture)
        width = fields.integer("hidden_size")
        heads = fields.integer("num_attention_heads")
        kv_heads = fields.integer(
            "num_key_value_heads", heads if fields.has("num_key_value_heads") else 32
        )
        if heads % kv_heads:
            raise CheckpointError(
                f"num_attention_heads is {heads} and num_key_value_heads is {kv_heads}; expected a "
                "multiple, as query heads share key heads evenly"
            )
        head_dim = fields.integer("head_dim", 128)
        layers = fields.integer("num_hidden_layers")
        fields.one_of("hidden_act", ("silu", "swish"), "silu")
        read = cls(
            vocab_tokens=fields.integer("vocab_size"),
            width=width,
            inner_width=fields.integer("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=read_rope(fields, head_dim),
            windows=_windows(fields, layers),
            tied_head=fields.flag("tie_word_embeddings", default=False),
            attention_bias=fields.flag("attention_bias", default=False),
        )
        fields.finish()
        return read


def _windows(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    """By layer: with `use_sliding_window`, those from `max_window_layers` on have a window."""
    window_tokens = fields.integer("sliding_window", 4096)
    used = fields.flag("use_sliding_window", default=False)
    full_layers = fields.integer("max_window_layers", 28, at_least=0)
    windows = fields.layer_windows(layers, window_tokens if used else 0)
    if not used or fields.value("layer_types") is not None:
        return windows
    return tuple(0 if layer < full_layers else window for layer, window in enumerate(windows))
