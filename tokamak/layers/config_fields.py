"""What a checkpoint's config says: typed fields out of Hugging Face's JSON, or an error that names them.

A family reads the fields it honours. Fields with which other models change the arithmetic of a decoder
are refused unless they hold the value that changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from tokamak.errors import CheckpointError, UnsupportedModelError

log = logging.getLogger(__name__)

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "rope_interleaved": (None, False),
    "final_logit_softcapping": (None, 0),
    "attn_logit_softcapping": (None, 0),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "attention_multiplier": (None,),
    "scale_emb": (None, 1),
    "scale_depth": (None,),
    "mup_enabled": (None, False),
    "query_pre_attn_scalar": (None,),
    "clip_qkv": (None,),
    "qk_layernorm": (None, False),
    "qk_norm": (None, False),
    "use_qk_norm": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "no_rope_layers": (None, []),
    "no_rope_layer_interval": (None, 0),
    "attn_temperature_tuning": (None, False, 0),
    "attention_chunk_size": (None, 0),
    "use_parallel_residual": (None, False),
    "parallel_attn": (None, False),
    "alibi": (None, False),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "use_bidirectional_attention": (None, False),
}
"""Fields that change a decoder's arithmetic in some model, with the values that do not."""

INERT_FIELDS = frozenset(
    {
        "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
        "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "initializer_range",
        "attention_dropout", "hidden_dropout", "resid_pdrop", "pretraining_tp", "is_llama_config",
        "auto_map", "task_specific_params", "output_attentions", "output_hidden_states",
        "return_dict", "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
    }
)  # fmt: skip
"""Fields that say nothing about inference arithmetic."""


class ConfigFields:
    """The fields of one config.json, each read once, by type."""

    def __init__(self, config: Mapping[str, object], architecture: str) -> None:
        self.config = config
        self.architecture = architecture
        self._read: set[str] = set(INERT_FIELDS)

    def has(self, name: str) -> bool:
        """Whether the field is written down, if only as null."""
        return name in self.config

    def value(self, name: str) -> object:
        """The field as JSON has it; None if it is null or missing."""
        self._read.add(name)
        return self.config.get(name)

    def integer(self, name: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A count of at least `at_least`; `default` where it is missing or null.

        Raises:
            CheckpointError: it is missing without a default, or no such number.
        """
        value = self.value(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self._wrong(name, value, f"a whole number from {at_least} on")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; `default` where it is missing or null.

        Raises:
            CheckpointError: it is missing without a default, or not a positive number.
        """
        value = self.value(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false; `default` where it is missing or null.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def one_of(self, name: str, supported: Sequence[str], default: str) -> str:
        """A name out of those we implement; `default` where it is missing or null.

        Raises:
            UnsupportedModelError: it is another one.
        """
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in supported:
            raise UnsupportedModelError(
                f"{self.architecture} with {name} {value!r} is not supported",
                hint=f"supported: {', '.join(supported)}",
            )
        return value

    def layer_windows(self, layers: int, window_tokens: int) -> tuple[int, ...]:
        """How many newest positions each layer sees, 0 for all; from `layer_types` where given.

        Raises:
            CheckpointError: `layer_types` does not have one entry per layer.
            UnsupportedModelError: a layer is of another type than full or sliding attention.
        """
        types = self.value("layer_types")
        if types is None:
            return (window_tokens,) * layers
        if not isinstance(types, list) or len(types) != layers:
            raise self._wrong("layer_types", types, f"a list of {layers} names, one per layer")
        windows = {"full_attention": 0, "sliding_attention": window_tokens}
        for name in types:
            if name not in windows:
                raise UnsupportedModelError(
                    f"{self.architecture} with a layer of type {name!r} (layer_types) is not supported",
                    hint=f"supported: {', '.join(windows)}",
                )
        return tuple(windows[name] for name in types)

    def finish(self) -> None:
        """Refuse what would change the arithmetic, and log the names nobody knows.

        Raises:
            UnsupportedModelError: a field of NEUTRAL_VALUES holds another value.
        """
        for name, neutral in NEUTRAL_VALUES.items():
            if name in self._read:
                continue
            value = self.value(name)
            if value not in neutral:
                shown = sorted(value) if isinstance(value, dict) else value
                raise UnsupportedModelError(
                    f"{self.architecture} with {name} {shown!r} is not supported",
                    hint=f"only checkpoints without {name} run here",
                )
        unknown = sorted(n for n in self.config if n not in self._read and not n.startswith("_"))
        if unknown:
            log.info(
                "config fields of %s without effect: %s", self.architecture, ", ".join(unknown)
            )

    def _wrong(self, name: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(
            f"config field {name} of {self.architecture} is {value!r}; expected {expected}",
            hint="the config is incomplete or belongs to another model",
        )
