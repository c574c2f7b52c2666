"""What the DeepSeek V4 decoder reads beyond what it shares with V4.1: kinds of layers, and those that hash tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tokamak.errors import CheckpointError, UnsupportedModelError
from tokamak.layers.config_fields import ConfigFields
from tokamak.models.deepseek_v4.config import (
    SharedConfig,
    integers,
    read_shared,
    refuse_foreign,
)

Kind = Literal["window", "sparse", "heavy"]
"""Window rows alone; chosen entries of few tokens; all entries of many tokens."""

KINDS: dict[str, Kind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "heavy",
}
"""By the names that newer configs give."""

RATIOS: dict[Kind, int] = {"sparse": 4, "heavy": 128}
"""Tokens of an entry, where a config does not say."""

OF_V4_1 = (
    "engram_layer_ids", "kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id",
)  # fmt: skip
"""Fields of V4.1: memories, and layers that read what others keep."""

HASH_LAYERS = 3
"""Where a config does not say: how many first layers choose experts by token id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Config:
    """A DeepSeek V4 decoder's sizes and choices."""

    shared: SharedConfig
    kinds: tuple[Kind, ...]
    """By layer."""
    ratios: Mapping[Kind, int]
    hashes: tuple[bool, ...]
    """By layer: whether a table of token ids chooses its experts."""

    @classmethod
    def read(cls, config: Mapping[str, object], architecture: str) -> V4Config:
        """Read a published config, or one as transformers writes it.

        Raises:
            UnsupportedModelError: a field asks for arithmetic we do not have.
            CheckpointError: a field is missing, of the wrong type or does not fit another.
        """
        fields = ConfigFields(config, architecture)
        shared = read_shared(fields)
        refuse_foreign(fields, OF_V4_1)
        ratios = _ratios(fields)
        read = cls(
            shared=shared,
            kinds=_kinds(fields, shared.layers, ratios),
            ratios=ratios,
            hashes=_hashes(fields, shared.layers),
        )
        fields.finish()
        return read


def _ratios(fields: ConfigFields) -> dict[Kind, int]:
    rates = fields.value("compress_rates") or {}
    if not isinstance(rates, Mapping):
        raise CheckpointError(f"compress_rates is {rates!r}; expected an object")
    found = dict(RATIOS)
    for name, kind in KINDS.items():
        rate = rates.get(name)
        if rate is not None:
            if kind == "window" or type(rate) is not int or rate < 2:
                raise CheckpointError(
                    f"compress_rates gives {name} {rate!r}; expected a whole number from 2 on for layers "
                    "with entries"
                )
            found[kind] = rate
    return found


def _kinds(fields: ConfigFields, layers: int, ratios: Mapping[Kind, int]) -> tuple[Kind, ...]:
    """By layer, from `layer_types` or the older `compress_ratios`; entries past the last layer are drafters'."""
    older = integers(fields, "compress_ratios")
    types = fields.value("layer_types")
    if types is None:
        of_ratio: dict[object, Kind] = {0: "window"}
        of_ratio.update({ratio: kind for kind, ratio in ratios.items()})
        found: list[Kind | None] = [of_ratio.get(ratio) for ratio in older[:layers]]
        shown: object = list(older)
    else:
        named = types if isinstance(types, list) else []
        found = [KINDS.get(str(name)) for name in named[:layers]]
        shown = types
    if len(found) < layers:
        raise CheckpointError(
            f"layer_types or compress_ratios of {fields.architecture} is {shown!r}; expected an entry for "
            f"each of {layers} layers"
        )
    kinds: list[Kind] = []
    for layer, kind in enumerate(found):
        if kind is None:
            raise UnsupportedModelError(
                f"{fields.architecture} with layer {layer} of another kind than "
                f"{', '.join(KINDS)} is not supported: {shown!r}"
            )
        kinds.append(kind)
    return tuple(kinds)


def _hashes(fields: ConfigFields, layers: int) -> tuple[bool, ...]:
    count = fields.integer("num_hash_layers", HASH_LAYERS, at_least=0)
    types = fields.value("mlp_layer_types")
    if types is None:
        return tuple(layer < count for layer in range(layers))
    if not isinstance(types, list) or len(types) < layers or not {*types} <= {"hash_moe", "moe"}:
        raise CheckpointError(
            f"mlp_layer_types of {fields.architecture} is {types!r}; expected hash_moe or moe for each of "
            f"{layers} layers"
        )
    return tuple(name == "hash_moe" for name in types[:layers])
