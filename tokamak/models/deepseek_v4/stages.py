"""V4.1 in two stages: layers up to the last that makes entries, and those that only read these and their windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tokamak.core.inputs import StepInputs
from tokamak.graphs.region import Manifest
from tokamak.layers.attention.sparse import Picked, nothing_picked
from tokamak.layers.stages import late_tokens, pack_rows, row_bytes, unpack_rows
from tokamak.models.deepseek_v4.config_v4_1 import V41Config


class Layer(Protocol):
    """What the stages ask of a layer."""

    def __call__(
        self,
        streams: Tensor,
        read: Tensor,
        picked: Picked,
        step: StepInputs,
        *,
        has_entries: bool = False,
    ) -> tuple[Tensor, Tensor, Picked]:
        """Run it; with `has_entries` the step's entries are made."""
        ...

    def make_entries(self, streams: Tensor, read: Tensor, step: StepInputs) -> None:
        """Make the step's entries and nothing else."""
        ...

    def regions(self) -> list[str]:
        """The eager regions it meets."""
        ...


def cut_layer(config: V41Config) -> int | None:
    """The layer where early ones end: the last that makes entries, which itself makes them early and attends late.

    None where a late layer needs more of a row than its streams: a memory in front of it, or choices made before.
    """
    if not config.entry_sources:
        return None
    cut = max(config.entry_sources)
    has_memory = any(layer >= cut for layer in config.engram.layers)
    chooses = cut in config.index_sources and not 0 <= config.candidate_source < cut
    return cut if chooses and not has_memory else None


def tail_tokens(config: V41Config, cut: int, *, bounded: bool) -> int:
    """Newest tokens of a prompt that the layers from `cut` on run for: the depth of the tail, decided here alone.

    With `bounded` a window, as the model is meant to be run; else as many as change no number.
    """
    shared = config.shared
    if bounded:
        return shared.window_tokens
    return late_tokens(window_tokens=shared.window_tokens, layers=shared.layers - cut)


class V41Stages:
    """Implements `layers.stages.Stages` over a decoder's layers."""

    def __init__(
        self,
        config: V41Config,
        layers: Sequence[Layer],
        cut: int,
        *,
        begin: Callable[[StepInputs], tuple[Tensor, Tensor]],
        begin_regions: Sequence[str],
        end: Callable[[Tensor, Tensor], Tensor],
        dtype: torch.dtype,
        bounded: bool,
    ) -> None:
        """begin: streams and coefficients of a step's tokens; end: both of them to hidden states.

        begin_regions: the eager regions that `begin` meets.
        """
        shared = config.shared
        self._early, self._late = tuple(layers[:cut]), tuple(layers[cut:])
        self._begin, self._end = begin, end
        self._begin_regions = tuple(begin_regions)
        self._streams, self._dtype = shared.mixing.count, dtype
        self.bounded = bounded
        self.late_tokens = tail_tokens(config, cut, bounded=bounded)
        self.carried_bytes = row_bytes(streams=self._streams, width=shared.width, dtype=dtype)

    def early(self, step: StepInputs) -> Tensor:
        """Early layers, and the entries of the layer at the cut: uint8 [tokens, carried_bytes]."""
        x, read = self._begin(step)
        picked = nothing_picked(step)
        for layer in self._early:
            x, read, picked = layer(x, read, picked, step)
        self._late[0].make_entries(x, read, step)
        return pack_rows(read, x)

    def late(self, carried: Tensor, step: StepInputs) -> Tensor:
        """The layers from the cut on: hidden states [rows, width]."""
        read, x = unpack_rows(carried, streams=self._streams, dtype=self._dtype)
        picked = nothing_picked(step)
        for layer in self._late:
            x, read, picked = layer(x, read, picked, step, has_entries=True)
        return self._end(x, read)

    def early_regions(self) -> Manifest:
        """Those of early layers, and folding at the cut."""
        folds = [name for name in self._late[0].regions() if name == "fold_groups"]
        early = [name for layer in self._early for name in layer.regions()]
        return Manifest.of(*self._begin_regions, *early, *folds)

    def late_regions(self) -> Manifest:
        """Those of late layers, without folding."""
        names = [name for layer in self._late for name in layer.regions()]
        return Manifest.of(*[name for name in names if name != "fold_groups"])
