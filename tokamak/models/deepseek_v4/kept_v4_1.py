"""What V4.1 keeps of a request, as sub-caches."""

from __future__ import annotations

from tokamak.cache.sub_cache import SubCache
from tokamak.models.deepseek_v4.config_v4_1 import V41Config
from tokamak.models.deepseek_v4.stages import cut_layer, tail_tokens

EARLY_WINDOW, LATE_WINDOW = "window", "late_window"


def window_name(config: V41Config, layer: int) -> str:
    """The sub-cache that has a layer's window rows: late layers, which run for few rows of a prompt, have their own."""
    cut = cut_layer(config)
    return EARLY_WINDOW if cut is None or layer < cut else LATE_WINDOW


def sub_caches(config: V41Config, dtype: str, *, bounded: bool) -> list[SubCache]:
    """Window rows of every layer; entries, index keys and open groups of those that make entries."""
    c, shared = config, config.shared
    found = _windows(config, dtype, bounded=bounded)
    for ratio in sorted({c.ratios[layer] for layer in c.entry_sources}, reverse=True):
        layers = tuple(layer for layer in c.entry_sources if c.ratios[layer] == ratio)
        for name, width in (("entries", shared.head_dim), ("index_keys", shared.index_dim)):
            found.append(SubCache(f"{name}_{ratio}", layers, 1, width, dtype, stride_tokens=ratio))
        if ratio > 1:
            found.append(
                SubCache(
                    f"open_groups_{ratio}",
                    layers,
                    1,
                    2 * shared.head_dim,
                    "float32",
                    keep_tokens=ratio,
                )
            )
    return found


def _windows(config: V41Config, dtype: str, *, bounded: bool) -> list[SubCache]:
    """Window rows of early layers, and of late ones where there are any."""
    shared, cut = config.shared, cut_layer(config)
    first_late = shared.layers if cut is None else cut
    depth = 0 if cut is None else tail_tokens(config, cut, bounded=bounded)
    return [
        SubCache(
            name,
            tuple(layers),
            1,
            shared.head_dim,
            dtype,
            keep_tokens=shared.window_tokens,
            late_tokens=late_tokens,
        )
        for name, layers, late_tokens in (
            (EARLY_WINDOW, range(first_late), 0),
            (LATE_WINDOW, range(first_late, shared.layers), depth),
        )
        if layers
    ]
