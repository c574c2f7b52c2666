"""What the DeepSeek V4.1 decoder reads beyond what it shares with V4: who owns entries, who chooses, who remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokamak.errors import CheckpointError
from tokamak.layers.config_fields import ConfigFields
from tokamak.layers.engram import hash_multipliers, hash_primes
from tokamak.models.deepseek_v4.config import (
    SharedConfig,
    integers,
    read_shared,
    refuse_foreign,
)

DRAFTER_FIELDS = (
    "dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank",
    "dspark_n_routed_experts", "dspark_num_experts_per_tok",
)  # fmt: skip
"""Of the drafter, which is no part of the decoder."""


OF_V4 = ("num_hash_layers", "mlp_layer_types", "layer_types", "compress_rates")
"""Fields of V4: experts by token id, and kinds of layers by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramConfig:
    """The n-gram memories of a model."""

    layers: tuple[int, ...]
    """In front of which they are."""
    primes: Mapping[int, tuple[tuple[int, ...], ...]]
    """By layer, order and hash."""
    multipliers: Mapping[int, tuple[int, ...]]
    head_dim: int
    pad_token: int
    compressed_tokens: int
    """Compressed ids there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class V41Config:
    """A DeepSeek V4.1 decoder's sizes and choices."""

    shared: SharedConfig
    ratios: tuple[int, ...]
    """By layer: tokens of a compressed entry, 0 where a layer reads none."""
    entry_sources: tuple[int, ...]
    """Layers that make entries; those behind read them until the next source."""
    index_sources: tuple[int, ...]
    """Layers that choose entries."""
    candidate_source: int
    """The index source whose blocks later ones keep to; -1 for none."""
    candidate_blocks: int
    block_entries: int
    engram: EngramConfig
    rounds_caches: bool = True
    """Whether cached rows go through the narrow formats the model was trained with."""

    @classmethod
    def read(cls, config: Mapping[str, object], architecture: str) -> V41Config:
        """Read a config, of the text part where it is nested.

        Raises:
            UnsupportedModelError: a field asks for arithmetic we do not have.
            CheckpointError: a field is missing, of the wrong type or does not fit another.
        """
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise CheckpointError(f"text_config is {text!r}; expected an object")
        fields = ConfigFields(text, architecture)
        shared = read_shared(fields)
        refuse_foreign(fields, OF_V4)
        for name in DRAFTER_FIELDS:
            fields.value(name)
        ratios = integers(fields, "compress_ratios")[: shared.layers]
        if len(ratios) < shared.layers:
            raise CheckpointError(
                f"compress_ratios of {architecture} has {len(ratios)} entries for {shared.layers} layers"
            )
        index_sources = integers(fields, "index_source_layer_ids")
        candidate = fields.value("candidate_source_layer_id")
        source = -1 if candidate is None else fields.integer("candidate_source_layer_id")
        read = cls(
            shared=shared,
            ratios=ratios,
            entry_sources=integers(fields, "kv_source_layer_ids"),
            index_sources=index_sources,
            candidate_source=source,
            candidate_blocks=fields.integer("candidate_topk_blocks", 1),
            block_entries=fields.integer("candidate_block_size", 1),
            engram=_read_engram(fields, shared),
        )
        read.check(architecture)
        fields.finish()
        return read

    def source_of(self, layer: int, sources: Sequence[int]) -> int:
        """The newest of some source layers up to a layer; -1 if there is none."""
        return max((source for source in sources if source <= layer), default=-1)

    def check(self, architecture: str) -> None:
        """Refuse layers that read what nobody makes.

        Raises:
            CheckpointError: a layer has no source, or one of another ratio; the message names it.
        """
        for layer, ratio in enumerate(self.ratios):
            if not ratio:
                continue
            for name, sources in (
                ("kv_source_layer_ids", self.entry_sources),
                ("index_source_layer_ids", self.index_sources),
            ):
                source = self.source_of(layer, sources)
                if source < 0 or self.ratios[source] != ratio:
                    raise CheckpointError(
                        f"layer {layer} of {architecture} reads entries of ratio {ratio}, and {name} "
                        f"{list(sources)} gives it "
                        + (f"layer {source} of {self.ratios[source]}" if source >= 0 else "none"),
                        hint="the config is incomplete or belongs to another model",
                    )
        chooses = self.candidate_source in self.index_sources
        if self.candidate_source >= 0 and not chooses:
            raise CheckpointError(
                f"candidate_source_layer_id is {self.candidate_source}, which is not among "
                f"index_source_layer_ids {list(self.index_sources)}"
            )
        makers = {
            self.source_of(layer, self.entry_sources)
            for layer in self.index_sources
            if chooses and layer >= self.candidate_source
        }
        if len(makers) > 1:
            raise CheckpointError(
                f"index_source_layer_ids {list(self.index_sources)} of {architecture} choose from entries of "
                f"layers {sorted(makers)} behind candidate_source_layer_id {self.candidate_source}; expected "
                "one, as its blocks are those of one layer's entries"
            )


def _read_engram(fields: ConfigFields, shared: SharedConfig) -> EngramConfig:
    """The memories' hashes, checked against the sizes of their tables.

    Raises:
        CheckpointError: a table has another size than its hashes reach.
    """
    layers = integers(fields, "engram_layer_ids")
    tables = integers(fields, "engram_num_embeddings")
    heads = fields.integer("engram_n_heads", 8)
    order = fields.integer("engram_max_ngram_size", 4, at_least=2)
    start = fields.integer("engram_vocab_size", 16_000_000)
    compressed = fields.integer("engram_compressed_vocab_size", shared.vocab_tokens)
    head_dim = fields.integer("engram_head_dim", 256)
    pad_token = fields.integer("engram_pad_token_id", 2, at_least=0)
    if len(tables) != len(layers) or any(layer >= shared.layers for layer in layers):
        raise CheckpointError(
            f"engram_layer_ids is {list(layers)} and engram_num_embeddings is {list(tables)}; expected a "
            f"table for each, and layers below {shared.layers}"
        )
    primes = hash_primes(start, layers, order - 1, heads)
    for layer, rows in zip(layers, tables, strict=True):
        reached = sum(map(sum, primes[layer]))
        if rows != reached:
            raise CheckpointError(
                f"engram_num_embeddings gives layer {layer} of {fields.architecture} {rows} rows; its "
                f"hashes from engram_vocab_size {start} on reach {reached}",
                hint="the table belongs to another model, or a field of its hashes is wrong",
            )
    return EngramConfig(
        layers=layers,
        primes=primes,
        multipliers={layer: hash_multipliers(layer, compressed, order) for layer in layers},
        head_dim=head_dim,
        pad_token=pad_token,
        compressed_tokens=compressed,
    )
