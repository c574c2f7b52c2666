"""The DeepSeek V4 decoder: what it keeps, where its weights are, and how tokens become scores.

Every layer makes its own compressed entries: few of many, which an indexer chooses, or all of few. What the release
does to cached rows beyond the arithmetic, rounding them to narrow formats, is not done here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from tokamak.cache.sub_cache import SubCache
from tokamak.core.inputs import StepInputs
from tokamak.graphs.region import Manifest
from tokamak.layers.attention.compressed import CacheRows, Compressor, Rotation, TurnedRows
from tokamak.layers.attention.sparse import Indexer, nothing_picked
from tokamak.layers.build import Build
from tokamak.layers.embedding import Embedding, Head
from tokamak.layers.model import Model, Parameter
from tokamak.layers.moe_rooted import RootedExperts
from tokamak.layers.norm import RMSNorm
from tokamak.layers.residual import HeadMix, MixSite, StreamReader
from tokamak.models.deepseek_v4 import weights
from tokamak.models.deepseek_v4.attention import Caches, entry_room, make_attention, state_dtype
from tokamak.models.deepseek_v4.config_v4 import V4Config

ROUNDED_COLUMNS = 128
"""Columns of a row that share a power of two where it is rounded to 8 bits, as in blocks of 128 x 128."""


class Entries:
    """Entries of one layer, or the index keys that describe them: a compressor and where its rows are kept."""

    def __init__(
        self,
        build: Build,
        config: V4Config,
        caches: Caches,
        layer: int,
        name: str,
        rotation: Rotation,
    ) -> None:
        c, kind = config.shared, config.kinds[layer]
        overlapped = kind == "sparse"
        self.rows = caches.rows(name, layer)
        self._turned = TurnedRows(build, self.rows, rotation)
        self.compressor = Compressor(
            build,
            width=c.width,
            latent=c.index_dim if name == "index_keys" else c.head_dim,
            ratio=config.ratios[kind],
            eps=c.norm_eps,
            state=caches.rows(f"open_{name}", layer),
            overlapped=overlapped,
            has_bias=True,
        )

    def make(self, x: Tensor, step: StepInputs) -> None:
        """Cache what the tokens of this step complete. x: [tokens, width], normed."""
        self._turned.write(self.compressor(x, step), step)


class V4Layer:
    """One decoder layer: attention and experts, each behind a site of hyper-connections."""

    def __init__(
        self, config: V4Config, build: Build, caches: Caches, layer: int, rotation: Rotation
    ) -> None:
        c, self.kind = config.shared, config.kinds[layer]
        self.attention_site = MixSite(build, c.mixing)
        self.attention_norm = RMSNorm(build, c.width, c.norm_eps)
        self.entries: Entries | None = None
        self.keys: Entries | None = None
        self.indexer: Indexer | None = None
        rows: CacheRows | None = None
        if self.kind != "window":
            self.entries = Entries(build, config, caches, layer, f"{self.kind}_entries", rotation)
            rows = self.entries.rows
        if self.kind == "sparse":
            self.keys = Entries(build, config, caches, layer, "index_keys", rotation)
            self.indexer = Indexer(
                build,
                width=c.width,
                q_width=c.q_rank,
                heads=c.index_heads,
                head_dim=c.index_dim,
                most=entry_room(build, self.keys.rows.ratio, c.index_entries),
                keys=self.keys.rows,
                rotation=rotation,
                rounded_q="",
            )
        self.attention = make_attention(
            build,
            c,
            window=caches.rows("window", layer),
            entries=rows,
            rotation=rotation,
            head_norms=True,
        )
        self.mlp_site = MixSite(build, c.mixing)
        self.mlp_norm = RMSNorm(build, c.width, c.norm_eps)
        self.experts = RootedExperts(
            build,
            width=c.width,
            inner_width=c.expert_width,
            experts=c.experts,
            chosen=c.chosen_experts,
            scale=c.expert_scale,
            limit=c.gate_limit,
            rounded=ROUNDED_COLUMNS,
            vocab_tokens=c.vocab_tokens if config.hashes[layer] else 0,
        )
        self._reader = StreamReader(build)

    def __call__(self, streams: Tensor, step: StepInputs, seen: Tensor) -> Tensor:
        """streams: [tokens, streams, width]; returns the same for the layer behind. seen: of `_all_entries`."""
        at = self.attention_site(streams)
        x = self._reader.normed(streams, at.read, self.attention_norm)
        streams = self.attention_site.expand(self._attend(x, step, seen), streams, at)
        at = self.mlp_site(streams)
        x = self._reader.normed(streams, at.read, self.mlp_norm)
        routed, shared = self.experts(x, step.token_ids)
        return self.mlp_site.expand(routed, streams, at, shared)

    def _attend(self, x: Tensor, step: StepInputs, seen: Tensor) -> Tensor:
        """x: [tokens, width], normed; returns the same shape. This step's rows and entries are cached."""
        latent_q = self.attention.begin(x, step)
        picked = nothing_picked(step)
        chosen = picked.entries
        if self.entries is not None:
            self.entries.make(x, step)
        if self.kind == "heavy":
            chosen = seen
        if self.indexer is not None and self.keys is not None:
            self.keys.make(x, step)
            chosen = self.indexer(x, latent_q, step, picked).entries
        return self.attention(latent_q, step, chosen)

    def regions(self) -> list[str]:
        """The eager regions it meets, in order."""
        of_kind = {
            "window": [],
            "sparse": ["fold_groups", "fold_groups", "select_entries"],
            "heavy": ["fold_groups"],
        }
        return [*of_kind[self.kind], "sparse_attention"]

    def weights(self, at: str, experts: int) -> weights.Weights:
        """Its parameters. at: its place, such as `layers.3`."""
        found = weights.layer_weights(self, at, experts)
        for name, entries, of in (
            ("entries", self.entries, "compressor"),
            ("index_keys", self.keys, "indexer.compressor"),
        ):
            if entries is not None:
                found |= weights.compressor_weights(
                    entries.compressor, f"{at}.{name}", f"{at}.attn.{of}"
                )
        if self.indexer is not None:
            found |= weights.indexer_weights(self.indexer, at)
        return found


class DeepseekV4(Model):
    """DeepSeek V4: sparse attention over each layer's own entries, hyper-connections, experts."""

    architectures = ("DeepseekV4ForCausalLM",)

    def __init__(self, config: V4Config, build: Build) -> None:
        super().__init__()
        self.config = config
        c = config.shared
        c.check_context(self.architectures[0], build.max_model_len)
        self._caches = Caches(build, _sub_caches(config, state_dtype(build)))
        self._head = Head(build, c.vocab_tokens, c.width)
        self._embedding = Embedding(build, c.vocab_tokens, c.width, head=None)
        rotations = [
            Rotation(build, rope.table(build.max_model_len, build.device))
            for rope in (c.window_rope, c.entry_rope)
        ]
        self._layers = tuple(
            V4Layer(config, build, self._caches, layer, rotations[kind != "window"])
            for layer, kind in enumerate(config.kinds)
        )
        self._heavy_entries = (
            entry_room(build, config.ratios["heavy"], build.max_model_len)
            if "heavy" in config.kinds
            else 0
        )
        self._head_mix = HeadMix(build, c.mixing)
        self._reader = StreamReader(build)
        self._final_norm = RMSNorm(build, c.width, c.norm_eps)
        self._named_as_in_transformers = False
        self._beside: frozenset[str] = frozenset()
        self.layers = build.layers

    @classmethod
    def from_config(cls, config: Mapping[str, object], build: Build) -> DeepseekV4:
        """Build the decoder a config describes, without weights.

        Raises:
            UnsupportedModelError: a field asks for arithmetic we do not have.
            CheckpointError: a field is missing, of the wrong type or does not fit another.
        """
        return cls(V4Config.read(config, cls.architectures[0]), build)

    def sub_caches(self) -> tuple[SubCache, ...]:
        """Window rows of every layer; entries, index keys and what they are folded of where there are any."""
        return self._caches.sub_caches

    def take_names(self, names: Collection[str]) -> None:
        """Choose between the published names and those of transformers."""
        self._named_as_in_transformers = "model.embed_tokens.weight" in names
        self._beside = weights.beside_the_decoder(names)

    def weights(self) -> Mapping[str, tuple[Parameter, tuple[str, ...]]]:
        """Every parameter: where it lives, and the checkpoint tensors it is made of."""
        mix = self._head_mix
        found: weights.Weights = {
            "embedding": (self._embedding, ("embed.weight",)),
            "final_norm": (self._final_norm.weight, ("norm.weight",)),
            "head": (self._head, ("head.weight",)),
            "head_mix.fn": (mix.fn, ("hc_head_fn",)),
            "head_mix.base": (mix.base, ("hc_head_base",)),
            "head_mix.scale": (mix.scale, ("hc_head_scale",)),
        }
        for at, layer in enumerate(self._layers):
            found |= layer.weights(f"layers.{at}", self.config.shared.experts)
        if self._named_as_in_transformers:
            return weights.as_in_transformers(found, self.config.shared.experts)
        return found

    def optional_weights(self) -> frozenset[str]:
        """Those of drafters."""
        return self._beside

    def regions(self) -> Manifest:
        """Folding, choosing and attending, layer by layer."""
        return Manifest.of(*[name for layer in self._layers for name in layer.regions()])

    def bind_caches(self, views: Mapping[str, Sequence[Tensor]]) -> None:
        """Give each layer its views."""
        self._caches.bind(views)

    def forward(self, step: StepInputs) -> Tensor:
        """The streams after the last layer as one, before the final norm: [tokens, width]."""
        x = self._embedding(step.token_ids)
        x = x.unsqueeze(1).expand(-1, self.config.shared.mixing.count, -1).contiguous()
        seen = self._seen(step)
        for layer in self._layers:
            x = layer(x, step, seen)
        return self._reader(x, self._head_mix(x))

    def _seen(self, step: StepInputs) -> Tensor:
        """The entries of heavy layers that each token sees, the same in all of them; of width 0 without any."""
        if not self._heavy_entries:
            return nothing_picked(step).entries
        return _all_entries(step, self.config.ratios["heavy"], self._heavy_entries)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary scores of some hidden rows: [rows, width] to [rows, vocab], float32."""
        return self._head.after_norm(hidden, self._final_norm)


def _all_entries(step: StepInputs, ratio: int, room: int) -> Tensor:
    """The numbers of all entries each token sees, -1 behind the last: int32 [tokens, room]."""
    numbers = torch.arange(room, dtype=torch.int32, device=step.positions.device)
    visible = (step.positions + 1) // ratio
    return torch.where(numbers < visible.unsqueeze(1), numbers, -1)


def _sub_caches(config: V4Config, dtype: str) -> list[SubCache]:
    """Rows that compressors fold are kept for the group they join and, overlapped, the group behind it."""
    c = config.shared
    every = tuple(range(c.layers))
    found = [SubCache("window", every, 1, c.head_dim, dtype, keep_tokens=c.window_tokens)]
    sparse = tuple(layer for layer in every if config.kinds[layer] == "sparse")
    heavy = tuple(layer for layer in every if config.kinds[layer] == "heavy")
    for name, layers, width, ratio, groups in (
        ("sparse_entries", sparse, c.head_dim, config.ratios["sparse"], 2),
        ("index_keys", sparse, c.index_dim, config.ratios["sparse"], 2),
        ("heavy_entries", heavy, c.head_dim, config.ratios["heavy"], 1),
    ):
        if layers:
            found.append(SubCache(name, layers, 1, width, dtype, stride_tokens=ratio))
            # Values and gates, each once for every group they join.
            numbers, keep = 2 * groups * width, groups * ratio
            found.append(SubCache(f"open_{name}", layers, 1, numbers, "float32", keep_tokens=keep))
    return found
