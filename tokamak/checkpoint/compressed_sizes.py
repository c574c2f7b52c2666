"""How large are models whose layers compress the tokens they keep? Counts from the config alone, no tensor is read.

Estimates for the settling of options; what is kept exactly, a model's sub-caches say.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

RATIOS_BY_TYPE = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Tokens of an entry by kind of layer, where a config does not say."""

FLOAT32 = 2
"""Numbers of the model's dtype that take the bytes of one in float32, at most."""


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
    """Numbers a token adds to the caches of all layers: its row in each, and its share of entries.

    What entries are folded of is kept in float32, and counted as twice as many numbers.
    """
    by_layer, sources = ratios(config), config.get("kv_source_layer_ids")
    total = len(by_layer) * head_dim
    for layer, ratio in enumerate(by_layer):
        if not ratio or (isinstance(sources, list) and layer not in sources):
            continue
        has_keys = isinstance(sources, list) or ratio == sparse_ratio(config)
        index_dim = int(config.get("index_head_dim") or 0) if has_keys else 0
        total += -(-(head_dim + index_dim) // ratio)
        if isinstance(sources, list):
            # Values and gates of entries; index keys are made of those.
            total += FLOAT32 * 2 * head_dim if ratio > 1 else 0
        else:
            # The same, of entries and of keys, for one group or for two that overlap.
            total += FLOAT32 * 2 * (head_dim + index_dim) * (2 if has_keys else 1)
    return total


def sparse_ratio(config: Mapping[str, Any]) -> int:
    """Tokens of an entry in layers whose groups overlap and whose entries are chosen."""
    name = "compressed_sparse_attention"
    return (RATIOS_BY_TYPE | (config.get("compress_rates") or {}))[name]


def ngram_token_numbers(config: Mapping[str, Any]) -> int:
    """Numbers that a token's row has of all n-gram memories from the start of a step on; 0 where there are none."""
    layers = config.get("engram_layer_ids") or ()
    names = ("engram_max_ngram_size", "engram_n_heads", "engram_head_dim")
    sizes = [config.get(name) for name in names]
    if not isinstance(layers, list) or not all(type(each) is int for each in sizes):
        return 0
    orders, heads, width = (int(each or 0) for each in sizes)
    return len(layers) * (orders - 1) * heads * width


def ngram_numbers(config: Mapping[str, Any]) -> int:
    """Numbers in the tables of a model's n-gram memories; 0 where a config has none or does not say."""
    rows, width = config.get("engram_num_embeddings"), config.get("engram_head_dim")
    if not isinstance(rows, list) or not all(type(each) is int for each in (*rows, width)):
        return 0
    return sum(rows) * int(width or 0)
