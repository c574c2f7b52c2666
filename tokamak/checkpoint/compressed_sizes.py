"""How large are models whose layers compress the tokens they keep? Counts from the config alone, no tensor is read.

Estimates for the settling of options; what is kept exactly, a model's sub-caches say.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

RATIOS_BY_TYPE = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Tokens of an entry by kind of layer, where a config does not say."""

OPEN_ROWS = 4
"""Numbers of an open group's row beside those of its entry: values and gates in twice the width."""


def ratios(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens of a compressed entry by layer, 0 for none; empty where a config has no such layers."""
    given, types = config.get("compress_ratios"), config.get("layer_types")
    if given is None and isinstance(types, list):
        rates = RATIOS_BY_TYPE | (config.get("compress_rates") or {})
        if not any(name in RATIOS_BY_TYPE for name in types):
            return ()
        given = [rates.get(name, 0) for name in types]
    if not isinstance(given, list) or not all(type(ratio) is int for ratio in given):
        return ()
    layers = config.get("num_hidden_layers")
    return tuple(given[:layers] if isinstance(layers, int) else given)


def block_multiple(config: Mapping[str, Any]) -> int:
    """What a cache block's tokens must be divisible by, so that no entry lies in two blocks."""
    return lcm(*(ratio for ratio in ratios(config) if ratio > 0))


def cache_token_numbers(config: Mapping[str, Any], head_dim: int) -> int:
    """Numbers a token adds to the caches of all layers: its row in each, and its share of entries."""
    index_dim = int(config.get("index_head_dim") or 0)
    by_layer = ratios(config)
    sources = config.get("kv_source_layer_ids")
    owners = [
        (layer, ratio)
        for layer, ratio in enumerate(by_layer)
        if ratio and (not isinstance(sources, list) or layer in sources)
    ]
    of_entries = sum(-(-(head_dim + index_dim) // ratio) for _, ratio in owners)
    of_open = sum(OPEN_ROWS * head_dim for _, ratio in owners if ratio > 1)
    return len(by_layer) * head_dim + of_entries + of_open
