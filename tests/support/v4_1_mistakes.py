"""What may go wrong in a DeepSeek V4.1 decoder without showing: each mistake, made on purpose in a running model.

Maxima and mean divergences are those stated for the golden model; how far scores move says which mistake it was not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.steps import a_build
from tests.support.tiny_v4 import a_v4_1
from tokamak.layers.attention.compressed import Rotation
from tokamak.layers.attention.sparse import Indexer
from tokamak.layers.engram import Engram
from tokamak.layers.norm import RMSNorm
from tokamak.layers.residual import Coefficients, MixSite
from tokamak.models.deepseek_v4.attention import EntrySource
from tokamak.models.deepseek_v4.v4_1 import DeepseekV41, V41Layer
from tokamak.ops.indexer import reference as index_reference
from tokamak.ops.moe_route import rooted
from tokamak.ops.quantize import fake_mxfp4
from tokamak.ops.rope import rotate_pairs

Make = Callable[[DeepseekV41, pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake, and how far it moves the golden scores of the rounded model.

    make: changes the model or what it calls. changes: of the config, made instead.
    """

    most: float
    """Stated: the largest difference of any score."""
    mean: float
    """Stated: the mean divergence of a row's distribution, in nats."""
    make: Make | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    def model(self, patch: pytest.MonkeyPatch) -> DeepseekV41:
        """The golden model with the mistake in it."""
        model = a_v4_1(a_build(), **self.changes)
        if self.make is not None:
            self.make(model, patch)
        return model


def _as_is(x: Tensor) -> Tensor:
    return x


def _sites(model: DeepseekV41) -> list[MixSite]:
    return [site for layer in model._layers for site in (layer.attention_site, layer.mlp_site)]


def _sources(model: DeepseekV41) -> list[EntrySource]:
    return [layer.source for layer in model._layers if layer.source is not None]


def _indexers(model: DeepseekV41) -> list[Indexer]:
    return [layer.indexer for layer in model._layers if layer.indexer is not None]


def _engrams(model: DeepseekV41) -> list[Engram]:
    return [layer.engram for layer in model._layers if layer.engram is not None]


def _rotations(model: DeepseekV41) -> list[Rotation]:
    return [layer.attention._rotation for layer in model._layers]


def mix_not_transposed(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    for site in _sites(model):
        right = site._expand
        patch.setattr(
            site,
            "_expand",
            lambda y, streams, write, mix, also, right=right: right(
                y, streams, write, mix.transpose(1, 2).contiguous(), also
            ),
        )


def write_halved(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    for site in _sites(model):
        right = site._coefficients

        def halved(*given: object, right: Callable[..., tuple[Tensor, ...]] = right) -> object:
            read, write, mix = right(*given)
            return read, write / 2, mix

        patch.setattr(site, "_coefficients", halved)


class OwnReader:
    """Reads the streams by the coefficients of the part that reads, in front of attention or of experts."""

    def __init__(self, layer: V41Layer, part: str) -> None:
        self._right = layer._reader
        self._calls = 0
        self._part = part
        site = layer.attention_site if part == "attention" else layer.mlp_site
        self._site = site

    def normed(self, streams: Tensor, read: Tensor, norm: RMSNorm) -> Tensor:
        part = ("attention", "experts")[self._calls % 2]
        self._calls += 1
        if part == self._part:
            found: Coefficients = self._site(streams)
            read = found.read
        return self._right.normed(streams, read, norm)


def own_read(model: DeepseekV41, patch: pytest.MonkeyPatch, *, part: str) -> None:
    for layer in model._layers:
        patch.setattr(layer, "_reader", OwnReader(layer, part))


def last_tokens_place(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    right = Rotation.__call__

    def call(self, x, positions, *, ratio=1):
        last = positions - positions % ratio + ratio - 1
        return right(self, x, last)

    patch.setattr(Rotation, "__call__", call)


def keys_of_rotated_latents(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    for source in _sources(model):
        starts: list[Tensor] = []
        right, down = source.compressor, source.key_down

        class Watched:
            ratio = right.ratio

            def __call__(self, x, step, right=right, starts=starts):
                starts[:] = [step.positions - step.positions % right.ratio]
                return right(x, step)

        patch.setattr(source, "compressor", Watched())
        patch.setattr(
            source,
            "key_down",
            lambda latents, source=source, down=down, starts=starts: down(
                source._entries._rotation(latents, starts[0])
            ),
        )


def last_entry_hidden(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    for indexer in _indexers(model):
        scorer = indexer._scorer
        right = scorer.score_topk
        patch.setattr(
            scorer,
            "score_topk",
            lambda rows, *lists, right=right, **rest: right(
                replace(rows, positions=rows.positions - 1), *lists, **rest
            ),
        )


def candidates_ignored(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    for indexer in _indexers(model):
        indexer._keeps_to_candidates = False


def newest_block_free(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    right = index_reference._best_of_blocks
    patch.setattr(
        index_reference,
        "_best_of_blocks",
        lambda scores, visible, size: right(scores, visible + 10**6, size),
    )


def negative_products_kept(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    right = index_reference._scores
    patch.setattr(index_reference, "_scores", lambda q, *rest: right(q, *rest) - right(-q, *rest))


def window_not_rounded(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    for layer in model._layers:
        layer.attention._rows._round = _as_is


def entries_rounded(
    model: DeepseekV41, patch: pytest.MonkeyPatch, *, by: Callable[[Tensor], Tensor]
) -> None:
    for source in _sources(model):
        source._entries._round = by


def index_not_rounded(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    for source in _sources(model):
        source._keys._round = _as_is
    for indexer in _indexers(model):
        indexer._round = _as_is


def values_left_turned(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    for layer in model._layers:
        right = layer.attention._attend
        patch.setattr(
            layer.attention, "_attend", lambda *given, right=right: right(*given[:-1], None)
        )


def halves_turned(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    def halved(x, positions, table, backwards, ratio=1):
        still, turning = x[..., : -table.shape[1]], x[..., -table.shape[1] :]
        paired = torch.stack(turning.chunk(2, dim=-1), dim=-1).flatten(-2)
        turned = rotate_pairs(paired, positions, table, backwards, ratio)
        halves = torch.cat([turned[..., 0::2], turned[..., 1::2]], dim=-1)
        return torch.cat([still, halves], dim=-1)

    for layer in model._layers:
        right = layer.attention._attend

        def attend(*given, right=right):
            *others, table = given
            positions, out = given[6], given[13]
            right(*others, None)
            out.copy_(halved(out, positions, table, True))

        patch.setattr(layer.attention, "_attend", attend)
    for rotation in set(_rotations(model)):
        patch.setattr(rotation, "_rotate", halved)


def windows_by_yarn(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    shared = model.config.shared
    rope = replace(shared.entry_rope, theta=shared.window_rope.theta)
    model._layers[0].attention._rotation.cos_sin = rope.table(256, torch.device("cpu"))


def sink_left_out(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    for layer in model._layers:
        layer.attention.sink.values.fill_(float("-inf"))


def heads_normed(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    for layer in model._layers:
        layer.attention._ones = torch.ones(model.config.shared.head_dim)


def bias_weighs(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    def route(scores: Tensor, bias: Tensor, chosen: int, scale: float) -> tuple[Tensor, Tensor]:
        biased = rooted._root(scores) + bias
        weights, ids = biased.topk(chosen)
        return ids.int(), weights / weights.sum(-1, keepdim=True) * scale

    for layer in model._layers:
        patch.setattr(layer.experts, "_route", route)


def entries_of_another(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    layers = model._layers
    for layer in layers[4:6]:
        layer.attention.entries = layers[2].attention.entries


def keys_of_another(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    indexers = _indexers(model)
    for indexer in indexers[1:]:
        indexer._keys = indexers[0]._keys


def gate_without_root(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    for engram in _engrams(model):
        patch.setattr(engram, "_gate", partial(_gate, over=(2,), root=False))


def gate_normed_over_streams(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    for engram in _engrams(model):
        patch.setattr(engram, "_gate", partial(_gate, over=(1, 2), root=True))


def _gate(
    streams: Tensor,
    keys: Tensor,
    values: Tensor,
    weight: Tensor,
    eps: float,
    *,
    over: tuple[int, ...],
    root: bool,
) -> Tensor:
    key = keys.view(streams.shape)
    dot = (
        (streams * weight * key).sum(-1)
        * torch.rsqrt(streams.square().mean(over, keepdim=True) + eps)[..., 0]
        * torch.rsqrt(key.square().mean(over, keepdim=True) + eps)[..., 0]
        * streams.shape[2] ** -0.5
    )
    if root:
        dot = dot.sign() * dot.abs().clamp(min=1e-6).sqrt()
    return streams + torch.sigmoid(dot).unsqueeze(-1) * values.unsqueeze(1)


def pad_of_raw_id(model: DeepseekV41, patch: pytest.MonkeyPatch) -> None:
    for engram in _engrams(model):
        engram._pad_id = model.config.engram.pad_token


MISTAKES = {
    "mixes are not transposed": Mistake(2.5, 0.072, mix_not_transposed),
    "attention reads by its own site": Mistake(2.4, 0.085, partial(own_read, part="attention")),
    "experts read by their own site": Mistake(3.4, 0.104, partial(own_read, part="experts")),
    "writes are not doubled": Mistake(3.4, 0.22, write_halved),
    "one normalisation of mixes": Mistake(2.3, 0.072, changes={"hc_sinkhorn_iters": 1}),
    "a window one too wide": Mistake(3.6, 0.22, changes={"sliding_window": 9}),
    "groups lie where they end": Mistake(2.2, 0.077, last_tokens_place),
    "index keys of rotated latents": Mistake(2.5, 0.088, keys_of_rotated_latents),
    "the newest entry is hidden": Mistake(2.3, 0.040, last_entry_hidden),
    "candidates are ignored": Mistake(1.2, 0.016, candidates_ignored),
    "the newest block may be left out": Mistake(1.2, 0.006, newest_block_free),
    "negative products count": Mistake(2.7, 0.091, negative_products_kept),
    "windows are not rounded": Mistake(2.3, 0.060, window_not_rounded),
    "entries are not rounded": Mistake(1.7, 0.030, partial(entries_rounded, by=_as_is)),
    "entries share scales of 32": Mistake(1.8, 0.038, partial(entries_rounded, by=fake_mxfp4)),
    "index rows are not rounded": Mistake(1.9, 0.044, index_not_rounded),
    "values stay turned": Mistake(3.4, 0.24, values_left_turned),
    "no sink": Mistake(2.9, 0.093, sink_left_out),
    "halves are turned": Mistake(4.1, 0.37, halves_turned),
    "windows are scaled by yarn": Mistake(1.9, 0.035, windows_by_yarn),
    "no yarn": Mistake(1.9, 0.025, changes={"rope_scaling": None}),
    "one base of angles": Mistake(2.7, 0.11, changes={"compress_rope_theta": 10000}),
    "heads of queries are normed": Mistake(3.0, 0.081, heads_normed),
    "the bias weighs experts": Mistake(2.2, 0.051, bias_weighs),
    "experts are not scaled": Mistake(2.8, 0.11, changes={"routed_scaling_factor": 1.0}),
    "gates are not limited": Mistake(3.9, 0.28, changes={"swiglu_limit": 1e9}),
    "entries of another layer": Mistake(2.5, 0.10, entries_of_another),
    "index keys of another layer": Mistake(2.4, 0.093, keys_of_another),
    "gates of memories without a root": Mistake(2.3, 0.061, gate_without_root),
    "gates of memories over all streams": Mistake(2.3, 0.046, gate_normed_over_streams),
    "texts of memories begin with a raw id": Mistake(3.0, 0.072, pad_of_raw_id),
}
