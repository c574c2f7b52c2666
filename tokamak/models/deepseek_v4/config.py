"""What the DeepSeek V4 and V4.1 decoders read of a checkpoint's config; what they share is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokamak.errors import CheckpointError, UnsupportedModelError
from tokamak.layers.config_fields import ConfigFields
from tokamak.layers.residual import Mixing
from tokamak.layers.rope import ORIGINAL, Rope

YARN_FIELDS = frozenset(
    {"type", "rope_type", "factor", "beta_fast", "beta_slow", ORIGINAL, "attention_factor"}
    | {"rope_theta", "partial_rotary_factor", "truncate", "mscale", "mscale_all_dim"}
)

INERT = (
    "intermediate_size", "initializer_range", "router_aux_loss_coef", "router_jitter_noise", "output_router_logits",
    "moe_layer_freq", "first_k_dense_replace", "n_group", "topk_group", "ep_size", "aux_loss_alpha", "seq_aux",
    "num_nextn_predict_layers", "expert_dtype", "quantization_config", "swiglu_alpha", "use_cache",
)  # fmt: skip
"""Fields that say nothing about the backbone here: training, formats of weights, drafting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedConfig:
    """Sizes and choices that V4 and V4.1 have both."""

    vocab_tokens: int
    width: int
    layers: int
    heads: int
    head_dim: int
    rotary_dim: int
    q_rank: int
    out_groups: int
    out_rank: int
    window_tokens: int
    norm_eps: float
    experts: int
    chosen_experts: int
    expert_width: int
    expert_scale: float
    gate_limit: float
    index_heads: int
    index_dim: int
    index_entries: int
    """Entries a row attends to."""
    mixing: Mixing
    window_rope: Rope
    """Of layers without compressed entries."""
    entry_rope: Rope
    """Of layers with them, window rows included."""
    trained_tokens: int

    def check_context(self, architecture: str, max_model_len: int) -> None:
        """Refuse a context the angles were not made for.

        Raises:
            UnsupportedModelError: it is longer than max_position_embeddings.
        """
        if max_model_len > self.trained_tokens:
            raise UnsupportedModelError(
                f"{architecture} with a context of {max_model_len} tokens is not supported: its "
                f"max_position_embeddings is {self.trained_tokens}",
                hint=f"set max_model_len to {self.trained_tokens} or less",
            )


def read_shared(fields: ConfigFields) -> SharedConfig:
    """Read what both have.

    Raises:
        UnsupportedModelError: a field asks for arithmetic we do not have.
        CheckpointError: a field is missing, of the wrong type or does not fit another.
    """
    _refuse_others(fields)
    heads, head_dim = fields.integer("num_attention_heads"), fields.integer("head_dim")
    groups = fields.integer("o_groups")
    if heads % groups:
        raise CheckpointError(
            f"num_attention_heads is {heads} and o_groups is {groups}; expected a multiple, as groups "
            "have as many heads each"
        )
    experts, chosen = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")
    if chosen > experts:
        raise CheckpointError(
            f"num_experts_per_tok is {chosen} and n_routed_experts is {experts}; expected no more "
            "choices than experts"
        )
    rotary_dim = _rotary_dim(fields, head_dim)
    trained = fields.integer("max_position_embeddings")
    window_rope, entry_rope = _ropes(fields, rotary_dim, trained)
    width = fields.integer("hidden_size")
    norm_eps = fields.number("rms_norm_eps")
    return SharedConfig(
        vocab_tokens=fields.integer("vocab_size"),
        width=width,
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        q_rank=fields.integer("q_lora_rank"),
        out_groups=groups,
        out_rank=fields.integer("o_lora_rank"),
        window_tokens=fields.integer("sliding_window"),
        norm_eps=norm_eps,
        experts=experts,
        chosen_experts=chosen,
        expert_width=fields.integer("moe_intermediate_size"),
        expert_scale=fields.number("routed_scaling_factor", 1.0),
        gate_limit=fields.number("swiglu_limit"),
        index_heads=fields.integer("index_n_heads"),
        index_dim=fields.integer("index_head_dim"),
        index_entries=fields.integer("index_topk"),
        mixing=Mixing(
            count=fields.integer("hc_mult"),
            width=width,
            norm_eps=norm_eps,
            mix_eps=fields.number("hc_eps"),
            iterations=fields.integer("hc_sinkhorn_iters"),
        ),
        window_rope=window_rope,
        entry_rope=entry_rope,
        trained_tokens=trained,
    )


def integers(fields: ConfigFields, name: str) -> tuple[int, ...]:
    """A list of whole numbers; empty where it is missing or null.

    Raises:
        CheckpointError: it is something else.
    """
    value = fields.value(name)
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(type(number) is int for number in value):
        raise CheckpointError(
            f"config field {name} of {fields.architecture} is {value!r}; expected a list of whole numbers",
            hint="the config is incomplete or belongs to another model",
        )
    return tuple(value)


def refuse_foreign(fields: ConfigFields, names: Sequence[str]) -> None:
    """Refuse fields of a relative whose mechanisms this model does not have.

    Raises:
        UnsupportedModelError: one of them says something.
    """
    for name in names:
        value = fields.value(name)
        if value not in (None, 0, []):
            raise UnsupportedModelError(
                f"{fields.architecture} with {name} {value!r} is not supported",
                hint=f"only checkpoints without {name} run here",
            )


def _refuse_others(fields: ConfigFields) -> None:
    """Refuse what would be computed otherwise, by name."""
    fields.one_of("hidden_act", ("silu", "swish"), "silu")
    fields.one_of("scoring_func", ("sqrtsoftplus",), "sqrtsoftplus")
    fields.one_of("topk_method", ("noaux_tc",), "noaux_tc")
    for name, only, default in (
        ("num_key_value_heads", 1, 1),
        ("n_shared_experts", 1, 1),
        ("norm_topk_prob", True, True),
        ("attention_bias", False, False),
        ("mlp_bias", False, False),
        ("tie_word_embeddings", False, False),
        ("gate_temp", 1, 1),
    ):
        value = fields.value(name)
        if (default if value is None else value) != only:
            raise UnsupportedModelError(
                f"{fields.architecture} with {name} {value!r} is not supported",
                hint=f"only checkpoints with {name} {only} run here",
            )
    for name in INERT:
        fields.value(name)


def _rotary_dim(fields: ConfigFields, head_dim: int) -> int:
    """`qk_rope_head_dim`, or the share of a head that newer files give."""
    partial = fields.value("partial_rotary_factor")
    if fields.has("qk_rope_head_dim"):
        rotary_dim = fields.integer("qk_rope_head_dim")
    elif isinstance(partial, int | float):
        rotary_dim = int(head_dim * partial)
    else:
        rotary_dim = fields.integer("qk_rope_head_dim")
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise CheckpointError(
            f"{rotary_dim} numbers of a head of {head_dim} turn with the position; expected an even count "
            f"from 2 to {head_dim}",
            hint="check qk_rope_head_dim or partial_rotary_factor",
        )
    return rotary_dim


def _ropes(fields: ConfigFields, rotary_dim: int, trained: int) -> tuple[Rope, Rope]:
    """Plain angles of window layers, and those of layers with compressed entries, scaled by YaRN or not."""
    theta = fields.number("rope_theta", 10_000.0)
    entry_theta = fields.number("compress_rope_theta")
    given, older = fields.value("rope_parameters"), fields.value("rope_scaling")
    scaling = given if given is not None else older
    if scaling is None:
        scaling = {}
    if isinstance(scaling, Mapping) and isinstance(scaling.get("compress"), Mapping):
        main = scaling.get("main")
        theta = _theta(main, theta)
        scaling = scaling["compress"]
        entry_theta = _theta(scaling, entry_theta)
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"rope_scaling is {scaling!r}; expected an object")
    window = Rope("default", theta, rotary_dim, trained)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return window, Rope("default", entry_theta, rotary_dim, trained)
    odd = sorted(str(name) for name in scaling if name not in YARN_FIELDS)
    if kind != "yarn" or odd:
        raise UnsupportedModelError(
            f"{fields.architecture} with rope type {kind!r}{' and ' + odd[0] if odd else ''} is not supported",
            hint="supported: default, yarn",
        )
    values = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": 1.0}
    for name in ("factor", "beta_fast", "beta_slow", ORIGINAL):
        value = scaling.get(name, values.get(name))
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(
                f"{name} of rope_scaling is {value!r}; expected a positive number"
            )
        values[name] = float(value)
    original = int(values.pop(ORIGINAL))
    # Neither angles nor scores are multiplied by YaRN's amplitude here.
    parameters = (*values.items(), ("attention_factor", 1.0))
    return window, Rope("yarn", entry_theta, rotary_dim, original, parameters)


def _theta(parameters: object, default: float) -> float:
    theta = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    return float(theta) if isinstance(theta, int | float) else default
