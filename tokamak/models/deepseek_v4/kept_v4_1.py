"""What V4.1 keeps of a request, as sub-caches."""

from __future__ import annotations

from tokamak.cache.sub_cache import SubCache
from tokamak.models.deepseek_v4.config_v4_1 import V41Config


def sub_caches(config: V41Config, dtype: str) -> list[SubCache]:
    """Window rows of every layer; entries, index keys and open groups of those that make entries."""
    c, shared = config, config.shared
    found = [
        SubCache(
            "window",
            tuple(range(shared.layers)),
            1,
            shared.head_dim,
            dtype,
            keep_tokens=shared.window_tokens,
        )
    ]
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
