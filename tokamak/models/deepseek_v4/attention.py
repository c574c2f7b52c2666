"""What V4 and V4.1 share between attention layers, and V4.1's layers that make entries for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokamak.cache.groups import group_sub_caches
from tokamak.cache.sub_cache import SubCache
from tokamak.core.inputs import StepInputs
from tokamak.layers.attention.compressed import CacheRows, Compressor, Rotation, TurnedRows
from tokamak.layers.attention.sparse import SparseAttention
from tokamak.layers.build import Build
from tokamak.layers.linear import Linear
from tokamak.layers.norm import RMSNorm
from tokamak.models.deepseek_v4.config import SharedConfig
from tokamak.models.deepseek_v4.records import form_of, in_records
from tokamak.ops.rotate_write import Rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The narrow formats that rows go through before they are cached or scored; nothing where a model has none."""

    window: Rounded = ""
    entry: Rounded = ""
    key: Rounded = ""
    query: Rounded = ""

    @classmethod
    def of_v4_1(cls, *, on: bool, packed: bool = False) -> Rounding:
        """Window rows in 8 bits, entries and index rows in 4 bits; `packed`: caches round what they pack."""
        if not on:
            return cls()
        if packed:
            return cls(query="mxfp4")
        return cls(window="fp8", entry="nvfp4", key="mxfp4", query="mxfp4")


class Caches:
    """The rows a model keeps: its sub-caches by name, and the layers that read and write them.

    With `packed`, rows that have a native format are records of it.
    """

    def __init__(
        self, build: Build, sub_caches: Sequence[SubCache], *, packed: bool = False
    ) -> None:
        if packed:
            sub_caches = in_records(sub_caches)
        self.sub_caches = tuple(sub_caches)
        self._group_of = {
            sub_cache.name: group.name
            for group in group_sub_caches(sub_caches)
            for sub_cache in group.sub_caches
        }
        self._rows = {
            sub_cache.name: {
                layer: CacheRows(
                    build,
                    self._group_of[sub_cache.name],
                    sub_cache.stride_tokens,
                    form_of(sub_cache.name) if packed else None,
                )
                for layer in sub_cache.layers
            }
            for sub_cache in sub_caches
        }

    def rows(self, name: str, layer: int) -> CacheRows:
        """A layer's rows in a sub-cache."""
        return self._rows[name][layer]

    def bind(self, views: Mapping[str, Sequence[Tensor]]) -> None:
        """Give every layer its view."""
        for name, by_layer in self._rows.items():
            for rows, view in zip(by_layer.values(), views[name], strict=True):
                rows.bind(view)


def make_attention(
    build: Build,
    config: SharedConfig,
    *,
    window: CacheRows,
    entries: CacheRows | None,
    rotation: Rotation,
    rounded_window: Rounded = "",
    head_norms: bool,
) -> SparseAttention:
    """The attention of one layer."""
    c = config
    return SparseAttention(
        build,
        width=c.width,
        heads=c.heads,
        head_dim=c.head_dim,
        q_rank=c.q_rank,
        out_groups=c.out_groups,
        out_rank=c.out_rank,
        window_tokens=c.window_tokens,
        window=window,
        entries=entries,
        rotation=rotation,
        rounded_window=rounded_window,
        eps=c.norm_eps,
        head_norms=head_norms,
    )


class EntrySource:
    """Makes the compressed entries of a V4.1 layer and the index keys that describe them."""

    def __init__(
        self,
        build: Build,
        config: SharedConfig,
        compressor: Compressor,
        *,
        entries: CacheRows,
        keys: CacheRows,
        rotation: Rotation,
        rounding: Rounding,
    ) -> None:
        self.compressor = compressor
        self.key_down = Linear(build, config.head_dim, (config.index_dim,))
        self.key_norm = RMSNorm(build, config.index_dim, config.norm_eps)
        self._keys = TurnedRows(build, keys, rotation, norm=self.key_norm, rounded=rounding.key)
        self._entries = TurnedRows(build, entries, rotation, rounded=rounding.entry)

    def __call__(self, x: Tensor, step: StepInputs) -> None:
        """Cache what the tokens of this step complete. x: [tokens, width], normed."""
        latents = self.compressor(x, step)
        self._keys.write(self.key_down(latents), step)
        self._entries.write(latents, step)


def state_dtype(build: Build) -> str:
    """The name of the model's dtype, as sub-caches call it."""
    return str(build.dtype).removeprefix("torch.")


def first_stream(step: StepInputs, streams: int) -> Tensor:
    """Coefficients that read the first of the streams alone: float32 [tokens, streams]."""
    read = torch.zeros(
        (step.positions.shape[0], streams), dtype=torch.float32, device=step.positions.device
    )
    read[:, 0] = 1.0
    return read


def entry_room(build: Build, ratio: int, most: int) -> int:
    """How many entries a row can attend to: no more than a request of the longest context has."""
    return min(most, -(-build.max_model_len // ratio))
