"""What the Qwen3 decoders, dense and with experts, read of a checkpoint's config."""

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
        heads = fields.integer("num_attention_heads")
        read = _read_dense(
            fields,
            kv_heads=heads if fields.has("num_key_value_heads") else 32,
            head_dim=128,
            windows=_windows(fields, fields.integer("num_hidden_layers")),
        )
        fields.finish()
        return read


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig:
    """The sizes and choices of a Qwen3 decoder with experts."""

    dense: Qwen3Config
    """What it shares with a decoder without; `inner_width` is that of layers without experts."""
    experts: int
    chosen_experts: int
    """Experts a token goes to."""
    expert_width: int
    renormalise: bool
    """Whether the weights of a token's experts add to 1."""
    has_experts: tuple[bool, ...]
    """By layer."""

    @classmethod
    def read(cls, config: Mapping[str, object], architecture: str) -> Qwen3MoeConfig:
        """Read a Hugging Face config; missing fields get the architecture's defaults.

        Raises:
            UnsupportedModelError: a field asks for arithmetic we do not have.
            CheckpointError: a field is missing, of the wrong type or does not fit another.
        """
        fields = ConfigFields(config, architecture)
        layers = fields.integer("num_hidden_layers")
        width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        dense = _read_dense(
            fields,
            kv_heads=heads if fields.has("num_key_value_heads") else 4,
            head_dim=max(width // heads, 1),
            windows=_windows_of_all(fields, layers),
        )
        experts = _experts(fields)
        chosen = fields.integer("num_experts_per_tok", 8)
        if chosen > experts:
            raise CheckpointError(
                f"num_experts_per_tok is {chosen} and num_experts is {experts}; expected no more "
                "choices than experts",
                hint="the config is incomplete or belongs to another model",
            )
        read = cls(
            dense=dense,
            experts=experts,
            chosen_experts=chosen,
            expert_width=fields.integer("moe_intermediate_size", 768),
            renormalise=fields.flag("norm_topk_prob", default=False),
            has_experts=_layers_with_experts(fields, layers),
        )
        fields.finish()
        return read


def _read_dense(
    fields: ConfigFields, *, kv_heads: int, head_dim: int, windows: tuple[int, ...]
) -> Qwen3Config:
    """What both kinds of decoder read; `kv_heads` and `head_dim` are for configs without them."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", kv_heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"num_attention_heads is {heads} and num_key_value_heads is {kv_heads}; expected a "
            "multiple, as query heads share key heads evenly"
        )
    head_dim = fields.integer("head_dim", head_dim)
    fields.one_of("hidden_act", ("silu", "swish"), "silu")
    return Qwen3Config(
        vocab_tokens=fields.integer("vocab_size"),
        width=fields.integer("hidden_size"),
        inner_width=fields.integer("intermediate_size"),
        layers=len(windows),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields, head_dim),
        windows=windows,
        tied_head=fields.flag("tie_word_embeddings", default=False),
        attention_bias=fields.flag("attention_bias", default=False),
    )


def _experts(fields: ConfigFields) -> int:
    """`num_experts`, or as newer files call it `num_local_experts`."""
    names = [name for name in ("num_experts", "num_local_experts") if fields.has(name)]
    counts = {name: fields.integer(name) for name in names}
    if len(set(counts.values())) > 1:
        raise CheckpointError(
            f"num_experts is {counts['num_experts']} and num_local_experts is "
            f"{counts['num_local_experts']}; expected the same count",
            hint="leave out one of them",
        )
    return next(iter(counts.values()), 128)


def _layers_with_experts(fields: ConfigFields, layers: int) -> tuple[bool, ...]:
    """By layer: every `decoder_sparse_step`-th has experts, unless `mlp_only_layers` lists it."""
    every = fields.integer("decoder_sparse_step", 1)
    dense = fields.value("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise CheckpointError(
            f"config field mlp_only_layers of {fields.architecture} is {dense!r}; expected a list of "
            "layer numbers",
            hint="the config is incomplete or belongs to another model",
        )
    return tuple((layer + 1) % every == 0 and layer not in dense for layer in range(layers))


def _windows_of_all(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    """By layer: with `use_sliding_window` every layer has a window; `max_window_layers` says nothing here."""
    window_tokens = fields.integer("sliding_window", 4096)
    used = fields.flag("use_sliding_window", default=False)
    fields.value("max_window_layers")
    return fields.layer_windows(layers, window_tokens if used else 0)


def _windows(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    """By layer: with `use_sliding_window`, those from `max_window_layers` on have a window."""
    window_tokens = fields.integer("sliding_window", 4096)
    used = fields.flag("use_sliding_window", default=False)
    full_layers = fields.integer("max_window_layers", 28, at_least=0)
    windows = fields.layer_windows(layers, window_tokens if used else 0)
    if not used or fields.value("layer_types") is not None:
        return windows
    return tuple(0 if layer < full_layers else window for layer, window in enumerate(windows))
