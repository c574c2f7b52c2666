"""Where the parameters of V4 and V4.1 are in a checkpoint: the published names, by part of a layer."""

from __future__ import annotations

from tokamak.layers.attention.compressed import Compressor
from tokamak.layers.attention.sparse import Indexer, SparseAttention
from tokamak.layers.engram import Engram
from tokamak.layers.model import Parameter
from tokamak.layers.moe_rooted import RootedExperts
from tokamak.layers.residual import MixSite

Weights = dict[str, tuple[Parameter, tuple[str, ...]]]


def attention_weights(attention: SparseAttention, at: str) -> Weights:
    """Those of every layer's attention. at: the layer's place, such as `layers.3`."""
    a, of = attention, f"{at}.attn"
    return {
        f"{at}.q_down": (a.q_down, (f"{of}.wq_a.weight",)),
        f"{at}.q_norm": (a.q_norm.weight, (f"{of}.q_norm.weight",)),
        f"{at}.q_up": (a.q_up, (f"{of}.wq_b.weight",)),
        f"{at}.kv_down": (a.kv_down, (f"{of}.wkv.weight",)),
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


def site_weights(site: MixSite, at: str, name: str) -> Weights:
    """Those of one site of hyper-connections. name: `attn` or `ffn`."""
    of = f"{at}.hc_{name}"
    return {
        f"{of}_fn": (site.fn, (f"{of}_fn",)),
        f"{of}_base": (site.base, (f"{of}_base",)),
        f"{of}_scale": (site.scale, (f"{of}_scale",)),
    }


def experts_weights(moe: RootedExperts, at: str, experts: int) -> Weights:
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
        f"{of}.q_weight": (engram.q_weight, (f"{of}.q_weight",)),
        f"{of}.k_weight": (engram.k_weight, (f"{of}.k_weight",)),
    }
