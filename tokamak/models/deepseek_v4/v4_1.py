"""The DeepSeek V4.1 decoder: what it keeps, where its weights are, and how tokens become scores.

Four streams instead of one residual stream. Few layers make compressed entries, which those behind them read; the
coefficients with which a part reads the streams come from the part before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from tokamak.cache.sub_cache import SubCache
from tokamak.core.inputs import StepInputs
from tokamak.graphs.region import Manifest
from tokamak.layers.attention.compressed import Compressor, Rotation
from tokamak.layers.attention.sparse import Indexer, Picked, nothing_picked
from tokamak.layers.build import Build
from tokamak.layers.embedding import Embedding, Head
from tokamak.layers.engram import Engram
from tokamak.layers.model import Model, Parameter
from tokamak.layers.moe_rooted import RootedExperts
from tokamak.layers.norm import RMSNorm
from tokamak.layers.residual import MixSite, StreamReader
from tokamak.models.deepseek_v4 import weights
from tokamak.models.deepseek_v4.attention import (
    Caches,
    EntrySource,
    Rounding,
    entry_room,
    first_stream,
    make_attention,
    state_dtype,
)
from tokamak.models.deepseek_v4.compressed_ids import compressed_ids
from tokamak.models.deepseek_v4.config_v4_1 import V41Config
from tokamak.models.deepseek_v4.kept_v4_1 import sub_caches, window_name
from tokamak.models.deepseek_v4.records import NATIVE, is_packed
from tokamak.models.deepseek_v4.stages import V41Stages, cut_layer
from tokamak.text.tokenizer import Tokenizer


class V41Layer:
    """One decoder layer: what it remembers, attention, experts, each behind a site of hyper-connections."""

    def __init__(
        self, config: V41Config, build: Build, caches: Caches, layer: int, rotation: Rotation
    ) -> None:
        c, shared = config, config.shared
        ratio = c.ratios[layer]
        rounding = Rounding.of_v4_1(on=c.rounds_caches, packed=build.cache_dtype == NATIVE)
        source = c.source_of(layer, c.entry_sources)
        entries = caches.rows(f"entries_{ratio}", source) if ratio else None
        self.engram = _make_engram(config, build, layer)
        self.attention_site = MixSite(build, shared.mixing)
        self.attention_norm = RMSNorm(build, shared.width, shared.norm_eps)
        self.attention = make_attention(
            build,
            shared,
            window=caches.rows(window_name(config, layer), layer),
            entries=entries,
            rotation=rotation,
            rounded_window=rounding.window,
            head_norms=False,
        )
        self.source: EntrySource | None = None
        self.indexer: Indexer | None = None
        if entries is not None and source == layer:
            self.source = EntrySource(
                build,
                shared,
                Compressor(
                    build,
                    width=shared.width,
                    latent=shared.head_dim,
                    ratio=ratio,
                    eps=shared.norm_eps,
                    state=caches.rows(f"open_groups_{ratio}", layer) if ratio > 1 else None,
                ),
                entries=entries,
                keys=caches.rows(f"index_keys_{ratio}", layer),
                rotation=rotation,
                rounding=rounding,
            )
        if ratio and layer in c.index_sources:
            chooses = layer == c.candidate_source
            self.indexer = Indexer(
                build,
                width=shared.width,
                q_width=shared.q_rank,
                heads=shared.index_heads,
                head_dim=shared.index_dim,
                most=entry_room(build, ratio, shared.index_entries),
                keys=caches.rows(f"index_keys_{ratio}", source),
                rotation=rotation,
                rounded_q=rounding.query,
                block_entries=c.block_entries,
                candidates=entry_room(build, ratio * c.block_entries, c.candidate_blocks),
                makes_candidates=chooses,
                keeps_to_candidates=0 <= c.candidate_source < layer,
            )
        self.mlp_site = MixSite(build, shared.mixing)
        self.mlp_norm = RMSNorm(build, shared.width, shared.norm_eps)
        self.experts = RootedExperts(
            build,
            width=shared.width,
            inner_width=shared.expert_width,
            experts=shared.experts,
            chosen=shared.chosen_experts,
            scale=shared.expert_scale,
            limit=shared.gate_limit,
        )
        self._reader = StreamReader(build)

    def make_entries(self, streams: Tensor, read: Tensor, step: StepInputs) -> None:
        """Make the entries and index keys of a step, and nothing else. Both tensors are those of a call."""
        assert self.source is not None, "only a source makes entries"
        self.source(self.attention_norm(self._reader(streams, read)), step)

    def __call__(
        self,
        streams: Tensor,
        read: Tensor,
        picked: Picked,
        step: StepInputs,
        *,
        has_entries: bool = False,
    ) -> tuple[Tensor, Tensor, Picked]:
        """streams: [tokens, streams, width]; read: float32 [tokens, streams], of the part before.

        With `has_entries`, `make_entries` has run for these tokens. Returns the same for the layer behind.
        """
        if self.engram is not None:
            streams = self.engram(streams)
        at = self.attention_site.beside(streams)
        x = self._reader.normed(streams, read, self.attention_norm)
        latent_q = self.attention.begin(x, step)
        self.attention_site.join(streams)
        if self.source is not None and not has_entries:
            self.source(x, step)
        if self.indexer is not None:
            picked = self.indexer(x, latent_q, step, picked)
        entries = picked.entries if self.attention.entries is not None else picked.entries[:, :0]
        y = self.attention(latent_q, step, entries)
        streams = self.attention_site.expand(y, streams, at)
        behind = self.mlp_site.beside(streams)
        x = self._reader.normed(streams, at.read, self.mlp_norm)
        routed, shared = self.experts(x, step.token_ids)
        self.mlp_site.join(streams)
        return self.mlp_site.expand(routed, streams, behind, shared), behind.read, picked

    def regions(self) -> list[str]:
        """The eager regions it meets, in order."""
        found: list[str] = []
        if self.engram is not None:
            found.append("engram_join")
        if self.source is not None and self.source.compressor.ratio > 1:
            found.append("fold_groups")
        if self.indexer is not None:
            found.append("select_entries")
        return [*found, "sparse_attention"]

    def weights(self, at: str, experts: int) -> weights.Weights:
        """Its parameters. at: its place, such as `layers.3`."""
        found = weights.layer_weights(self, at, experts)
        if self.engram is not None:
            found |= weights.engram_weights(self.engram, at)
        if self.source is not None:
            of = f"{at}.attn"
            found |= weights.compressor_weights(
                self.source.compressor, f"{at}.compressor", f"{of}.compressor"
            )
            found[f"{at}.key_down"] = (self.source.key_down, (f"{of}.indexer.wk.weight",))
            found[f"{at}.key_norm"] = (
                self.source.key_norm.weight,
                (f"{of}.indexer.k_norm.weight",),
            )
        if self.indexer is not None:
            found |= weights.indexer_weights(self.indexer, at)
        return found


class DeepseekV41(Model):
    """DeepSeek V4.1: sparse attention over entries of few layers, n-gram memories, hyper-connections, experts."""

    architectures = ("DeepseekV41ForCausalLM",)
    cache_dtypes = (NATIVE,)

    def __init__(self, config: V41Config, build: Build) -> None:
        super().__init__()
        self.config = config
        c = config.shared
        c.check_context(self.architectures[0], build.max_model_len)
        packed = is_packed(build, self.architectures[0], rounds=config.rounds_caches)
        kept = sub_caches(config, state_dtype(build), bounded=build.bounded_replay)
        self._caches = Caches(build, kept, packed=packed)
        self._head = Head(build, c.vocab_tokens, c.width)
        self._embedding = Embedding(build, c.vocab_tokens, c.width, head=None)
        rotations = [
            Rotation(build, rope.table(build.max_model_len, build.device))
            for rope in (c.window_rope, c.entry_rope)
        ]
        self._layers = tuple(
            V41Layer(config, build, self._caches, layer, rotations[ratio > 0])
            for layer, ratio in enumerate(config.ratios)
        )
        self._reader = StreamReader(build)
        self._final_norm = RMSNorm(build, c.width, c.norm_eps)
        self._device = build.device
        self._engrams = [layer.engram for layer in self._layers if layer.engram is not None]
        cut = cut_layer(config)
        self._stages = (
            None
            if cut is None
            else V41Stages(
                config,
                self._layers,
                cut,
                begin=self._begin,
                begin_regions=self._begin_regions(),
                end=self._reader,
                dtype=build.dtype,
                bounded=build.bounded_replay,
            )
        )
        self._beside: frozenset[str] = frozenset()
        self.layers = build.layers

    @classmethod
    def from_config(cls, config: Mapping[str, object], build: Build) -> DeepseekV41:
        """Build the decoder a config describes, without weights.

        Raises:
            UnsupportedModelError: a field asks for arithmetic we do not have.
            CheckpointError: a field is missing, of the wrong type or does not fit another.
        """
        return cls(V41Config.read(config, cls.architectures[0]), build)

    def take_names(self, names: Collection[str]) -> None:
        """Note what a checkpoint has beside the decoder."""
        self._beside = weights.beside_the_decoder(names)

    def take_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Number the tokens for the n-gram memories; any numbers do for random weights.

        Raises:
            CheckpointError: the memories were made for another tokenizer.
        """
        engram, vocab_tokens = self.config.engram, self.config.shared.vocab_tokens
        if not engram.layers:
            return
        if tokenizer is None:
            ids = [token % engram.compressed_tokens for token in range(vocab_tokens)]
        else:
            ids = compressed_ids(
                tokenizer, vocab_tokens=vocab_tokens, expected=engram.compressed_tokens
            )
        self.take_compressed_ids(ids)

    def take_compressed_ids(self, compressed_ids: Sequence[int]) -> None:
        """What the n-gram memories call each token id: numbers from 0 on, fewer than there are ids."""
        engram = self.config.engram
        ids = torch.tensor(list(compressed_ids), dtype=torch.int64, device=self._device)
        for memory in self._engrams:
            memory.take_ids(ids, int(compressed_ids[engram.pad_token]))

    def sub_caches(self) -> tuple[SubCache, ...]:
        """Window rows of every layer; entries, index keys and open groups of those that make entries."""
        return self._caches.sub_caches

    def weights(self) -> Mapping[str, tuple[Parameter, tuple[str, ...]]]:
        """Every parameter: where it lives, and the checkpoint tensors it is made of."""
        found: weights.Weights = {
            "embedding": (self._embedding, ("embed.weight",)),
            "final_norm": (self._final_norm.weight, ("norm.weight",)),
            "head": (self._head, ("head.weight",)),
        }
        for at, layer in enumerate(self._layers):
            found |= layer.weights(f"layers.{at}", self.config.shared.experts)
        return found

    def optional_weights(self) -> frozenset[str]:
        """Router biases of image tokens, and what drafts or reads images."""
        layers = range(self.config.shared.layers)
        return self._beside | {f"layers.{at}.ffn.gate.bias_vl" for at in layers}

    def regions(self) -> Manifest:
        """Fetches of memories; then memories, folding, choosing and attending, layer by layer."""
        by_layer = [name for layer in self._layers for name in layer.regions()]
        return Manifest.of(*self._begin_regions(), *by_layer)

    def bind_caches(self, views: Mapping[str, Sequence[Tensor]]) -> None:
        """Give each layer its views."""
        self._caches.bind(views)

    def forward(self, step: StepInputs) -> Tensor:
        """The streams after the last layer as one, before the final norm: [tokens, width]."""
        (x, read), picked = self._begin(step), nothing_picked(step)
        for layer in self._layers:
            x, read, picked = layer(x, read, picked, step)
        return self._reader(x, read)

    def stages(self) -> V41Stages | None:
        """Layers up to the last source of entries, and those behind."""
        return self._stages

    def _begin(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        streams = self.config.shared.mixing.count
        for engram in self._engrams:
            engram.fetch(step.token_ids.shape[0])
        x = self._embedding(step.token_ids)
        return x.unsqueeze(1).expand(-1, streams, -1).contiguous(), first_stream(step, streams)

    def _begin_regions(self) -> list[str]:
        """The eager regions that `_begin` meets."""
        return ["engram_fetch"] * len(self._engrams)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary scores of some hidden rows: [rows, width] to [rows, vocab], float32."""
        return self._head.after_norm(hidden, self._final_norm)


def _make_engram(config: V41Config, build: Build, layer: int) -> Engram | None:
    """The memory in front of a layer, if there is one."""
    engram, shared = config.engram, config.shared
    if layer not in engram.layers:
        return None
    return Engram(
        build,
        streams=shared.mixing.count,
        width=shared.width,
        head_dim=engram.head_dim,
        primes=engram.primes[layer],
        multipliers=engram.multipliers[layer],
        eps=shared.norm_eps,
    )
