"""Where the parameters of V4 and V4.1 are in a checkpoint: the published names, by part of a layer."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from tokamak.core.weight import DenseWeight, Weight
from tokamak.layers.attention.compressed import Compressor
from tokamak.layers.attention.sparse import Indexer, SparseAttention
from tokamak.layers.engram import Engram
from tokamak.layers.model import Parameter
from tokamak.layers.moe import StackedExperts
from tokamak.layers.moe_rooted import RootedExperts
from tokamak.layers.norm import RMSNorm
from tokamak.layers.plain import fan_in
from tokamak.layers.residual import MixSite

Weights = dict[str, tuple[Parameter, tuple[str, ...]]]


class Layer(Protocol):
    """What the layers of both models have."""

    attention_site: MixSite
    attention_norm: RMSNorm
    attention: SparseAttention
    mlp_site: MixSite
    mlp_norm: RMSNorm
    experts: RootedExperts


def layer_weights(layer: Layer, at: str, experts: int) -> Weights:
    """Those of every layer's attention and experts. at: its place, such as `layers.3`."""
    return {
        f"{at}.attention_norm": (layer.attention_norm.weight, (f"{at}.attn_norm.weight",)),
        f"{at}.mlp_norm": (layer.mlp_norm.weight, (f"{at}.ffn_norm.weight",)),
        **_site_weights(layer.attention_site, at, "attn"),
        **_site_weights(layer.mlp_site, at, "ffn"),
        **_attention_weights(layer.attention, at),
        **_experts_weights(layer.experts, at, experts),
    }


def _attention_weights(attention: SparseAttention, at: str) -> Weights:
    """Those of every layer's attention. at: the layer's place, such as `layers.3`."""
    a, of = attention, f"{at}.attn"
    return {
        f"{at}.qkv_down": (a.qkv_down, (f"{of}.wq_a.weight", f"{of}.wkv.weight")),
        f"{at}.q_norm": (a.q_norm.weight, (f"{of}.q_norm.weight",)),
        f"{at}.q_up": (a.q_up, (f"{of}.wq_b.weight",)),
        f"{at}.kv_norm": (a.kv_norm.weight, (f"{of}.kv_norm.weight",)),
        f"{at}.sink": (a.sink, (f"{of}.attn_sink",)),
        f"{at}.out_down": (a.out_down, (f"{of}.wo_a.weight",)),
        f"{at}.out_up": (a.out_up, (f"{of}.wo_b.weight",)),
    }


def compressor_weights(compressor: Compressor, at: str, of: str) -> Weights:
    """Those of one compressor. of: its place in the checkpoint."""
    gated = compressor.ratio > 1
    names = ("wkv", "wgate") if gated else ("wkv",)
    found: Weights = {
        f"{at}.values": (compressor.values, tuple(f"{of}.{name}.weight" for name in names)),
        f"{at}.norm": (compressor.norm.weight, (f"{of}.norm.weight",)),
    }
    if compressor.bias is not None:
        found[f"{at}.bias"] = (compressor.bias, (f"{of}.ape",))
    return found


def indexer_weights(indexer: Indexer, at: str) -> Weights:
    """Those of one indexer, without its keys."""
    of = f"{at}.attn.indexer"
    return {
        f"{at}.index_q_up": (indexer.q_up, (f"{of}.wq_b.weight",)),
        f"{at}.index_head_weights": (indexer.head_weights, (f"{of}.weights_proj.weight",)),
    }


def _site_weights(site: MixSite, at: str, name: str) -> Weights:
    """Those of one site of hyper-connections. name: `attn` or `ffn`."""
    of = f"{at}.hc_{name}"
    return {
        f"{of}_fn": (site.fn, (f"{of}_fn",)),
        f"{of}_base": (site.base, (f"{of}_base",)),
        f"{of}_scale": (site.scale, (f"{of}_scale",)),
    }


def _experts_weights(moe: RootedExperts, at: str, experts: int) -> Weights:
    """Those of a layer's experts, expert by expert."""
    of = f"{at}.ffn"
    shared = f"{of}.shared_experts"
    gate_up = tuple(
        f"{of}.experts.{expert}.{name}.weight" for expert in range(experts) for name in ("w1", "w3")
    )
    down = tuple(f"{of}.experts.{expert}.w2.weight" for expert in range(experts))
    found: Weights = {
        f"{at}.router": (moe.router, (f"{of}.gate.weight",)),
        f"{at}.gate_up": (moe.gate_up, gate_up),
        f"{at}.down": (moe.down, down),
        f"{at}.shared_gate_up": (
            moe.shared_gate_up,
            (f"{shared}.w1.weight", f"{shared}.w3.weight"),
        ),
        f"{at}.shared_down": (moe.shared_down, (f"{shared}.w2.weight",)),
    }
    if moe.bias is not None:
        found[f"{at}.router_bias"] = (moe.bias, (f"{of}.gate.bias",))
    if moe.table is not None:
        found[f"{at}.expert_table"] = (moe.table, (f"{of}.gate.tid2eid",))
    return found


def engram_weights(engram: Engram, at: str) -> Weights:
    """Those of one n-gram memory."""
    of = f"{at}.engram"
    return {
        f"{of}.table": (engram.table, (f"{of}.embed.weight",)),
        f"{of}.key_value": (engram.key_value, (f"{of}.wkv.weight",)),
        f"{of}.weights": (engram.weights, (f"{of}.q_weight", f"{of}.k_weight")),
    }


BESIDE = ("mtp.", "vision.", "aligner.", "image_", "model.mtp.")
"""How names begin of tensors that are not the decoder's: drafters and what reads images."""


def beside_the_decoder(names: Collection[str]) -> frozenset[str]:
    """Those of some tensor names that a decoder has no place for and does not need."""
    return frozenset(name for name in names if name.startswith(BESIDE))


EXPERT = re.compile(r"(.*)\.experts\.\d+\.(w1|w2|w3)\.weight")

TRANSFORMERS_NAMES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^embed\.", "model.embed_tokens."),
        (r"^head\.", "lm_head."),
        (r"^hc_head_", "model.hc_head.hc_"),
        (r"^(norm|layers)\.", r"model.\1."),
        (r"\.attn\.indexer\.compressor\.", ".attn.compressor.indexer."),
        (r"\.attn\.indexer\.wq_b\.", ".attn.compressor.indexer.q_b_proj."),
        (
            r"\.attn\.indexer\.weights_proj\.",
            ".attn.compressor.indexer.scorer.weights_proj.",
        ),
        (r"(\.compressor\..*)\bnorm\.", r"\1kv_norm."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.hc_(attn|ffn)_", r".\1_hc."),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.attn_sink$", ".sinks"),
        (r"\.ape$", ".position_bias"),
        (r"\.wq_a\.", ".q_a_proj."),
        (r"\.wq_b\.", ".q_b_proj."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.wo_a\.", ".o_a_proj."),
        (r"\.wo_b\.", ".o_b_proj."),
        (r"\.q_norm\.", ".q_a_norm."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
        (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
        (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    )
)
"""From V4's published names to those in transformers, in this order."""


class OneTensor:
    """Experts whose matrices a checkpoint has as one tensor, [experts, rows, width]."""

    def __init__(self, experts: StackedExperts, count: int) -> None:
        shapes = experts.part_shapes
        self._experts = experts
        self._rows = [rows for rows, _ in shapes]
        self._shape = (count, sum(self._rows) // count, shapes[0][1])

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """[experts, rows, width], once."""
        return (self._shape,)

    def load(self, parts: Sequence[Weight]) -> None:
        """Cut the one part into matrices."""
        (part,) = parts
        assert part.shape == self._shape, f"experts of {part.shape} for {self._shape}"
        flat = part.dense(torch.float32).reshape(-1, self._shape[2])
        self._experts.load([DenseWeight(rows) for rows in flat.split(self._rows)])

    def draw(self, generator: torch.Generator) -> list[Weight]:
        """A random part that keeps the size of what passes through."""
        return [DenseWeight(fan_in(self._shape, generator))]


def as_in_transformers(
    found: Mapping[str, tuple[Parameter, tuple[str, ...]]], experts: int
) -> Weights:
    """The same parameters by the names, and in the tensors, that transformers holds V4 in."""
    renamed: Weights = {}
    for own, (parameter, names) in found.items():
        if isinstance(parameter, StackedExperts):
            match = EXPERT.fullmatch(names[0])
            assert match is not None, f"{names[0]} is no expert's"
            last = "down_proj" if match[2] == "w2" else "gate_up_proj"
            where = f"{_in_transformers(match[1] + '.')}experts.{last}"
            renamed[own] = (OneTensor(parameter, experts), (where,))
        else:
            renamed[own] = (parameter, tuple(map(_in_transformers, names)))
    return renamed


def _in_transformers(name: str) -> str:
    for pattern, replacement in TRANSFORMERS_NAMES:
        name = pattern.sub(replacement, name)
    return name
