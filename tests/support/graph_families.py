"""Small models whose steps are recorded: four real families, one with a shared expert and a sparse one.

The last two have what no family here has yet: an expert that all rows share beside those they choose, and attention over
blocks that a second kind of region picks with the help of derived tables. A forward reads no number to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tests.support.steps import a_model
from tests.support.tiny import (
    VOCAB_TOKENS,
    llama_config,
    mistral_config,
    qwen3_config,
    qwen3_moe_config,
    tiny_weights,
)
from tests.support.tiny_v4 import SMALL, a_v4_1, v4_config, weights_of
from tokamak.cache.sub_cache import SubCache
from tokamak.core.context import StepContext, current
from tokamak.core.inputs import Rows, StepInputs
from tokamak.graphs.region import Manifest, eager_region
from tokamak.layers.attention.gqa import GROUP, GroupedQueryAttention
from tokamak.layers.build import Build
from tokamak.layers.embedding import Embedding, Head
from tokamak.layers.linear import Linear
from tokamak.layers.mlp import GatedMLP
from tokamak.layers.model import Model, Parameter
from tokamak.layers.norm import RMSNorm
from tokamak.layers.rope import Rope
from tokamak.layers.rows import hand_back
from tokamak.ops.rope import rotate_and_cache

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 16
LAYERS = 2
EPS = 1e-5
EXPERTS, CHOSEN_EXPERTS, EXPERT_WIDTH = 8, 2, 24
WINDOW_TOKENS, PICKED_BLOCKS, TILE_ROWS = 4, 1, 4

Weights = dict[str, tuple[Parameter, tuple[str, ...]]]


class TinyDecoder(Model):
    """What both kinds share: an embedding, `LAYERS` layers between norms, a head. Weights are random."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self._head = Head(build, VOCAB_TOKENS, WIDTH)
        self._embedding = Embedding(build, VOCAB_TOKENS, WIDTH, head=None)
        self._final_norm = RMSNorm(build, WIDTH, EPS)
        rope = Rope("default", 10_000.0, HEAD_DIM, build.max_model_len)
        self._cos_sin = rope.table(build.max_model_len, build.device)
        self._norms = [RMSNorm(build, WIDTH, EPS) for _ in range(2 * LAYERS)]

    def sub_caches(self) -> tuple[SubCache, ...]:
        """Keys and values of every layer."""
        layers = tuple(range(LAYERS))
        return tuple(
            SubCache(name, layers, KV_HEADS, HEAD_DIM, "float32") for name in ("keys", "values")
        )

    def weights(self) -> Mapping[str, tuple[Parameter, tuple[str, ...]]]:
        """Every parameter; there is no checkpoint they could come from."""
        found: dict[str, Parameter] = {
            "embedding": self._embedding,
            "head": self._head,
            "final_norm": self._final_norm.weight,
        }
        found |= {f"norms.{at}": norm.weight for at, norm in enumerate(self._norms)}
        found |= self.layer_parameters()
        return {name: (parameter, (name,)) for name, parameter in found.items()}

    def optional_weights(self) -> frozenset[str]:
        """None."""
        return frozenset()

    def layer_parameters(self) -> dict[str, Parameter]:
        """Those of attention and of what follows it, by name."""
        raise NotImplementedError

    def attend(self, residual: Tensor, norm: RMSNorm, layer: int, step: StepInputs) -> Tensor:
        """What the attention of a layer adds to the residual stream. [tokens, WIDTH], as what it returns."""
        raise NotImplementedError

    def feed(self, x: Tensor, layer: int) -> Tensor:
        """What follows attention. x: [tokens, WIDTH]; returns the same shape."""
        raise NotImplementedError

    def forward(self, step: StepInputs) -> Tensor:
        """The residual stream after the last layer: [tokens, WIDTH]."""
        residual = self._embedding(step.token_ids)
        for layer in range(LAYERS):
            before, after = self._norms[2 * layer : 2 * layer + 2]
            residual = residual + self.attend(residual, before, layer, step)
            residual = residual + self.feed(after(residual), layer)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary scores of some hidden rows, [rows, vocab] float32, far apart from each other."""
        return 4.0 * self._head(self._final_norm(hidden))


class RoutedExperts:
    """Each row through `CHOSEN_EXPERTS` of `EXPERTS` and one that all share; the others weigh 0."""

    def __init__(self, build: Build) -> None:
        self.router = Linear(build, WIDTH, (EXPERTS,))
        self.shared = GatedMLP(build, WIDTH, EXPERT_WIDTH)
        self.experts = [GatedMLP(build, WIDTH, EXPERT_WIDTH) for _ in range(EXPERTS)]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, WIDTH]; returns the same shape."""
        scores = self.router(x)
        best, chosen = scores.topk(CHOSEN_EXPERTS, dim=-1)
        gates = torch.zeros_like(scores).scatter(1, chosen, best.softmax(-1))
        mixed = self.shared.feed(x)
        for at, expert in enumerate(self.experts):
            gate = gates[:, at : at + 1]
            # Not a product alone: in a row that is not a number, the experts it did not choose stay out.
            mixed = mixed + torch.where(gate > 0, gate * expert.feed(x), 0.0)
        return mixed


class TinyMoE(TinyDecoder):
    """Grouped-query attention and routed experts."""

    architectures = ("TinyMoEForTests",)

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self._attention = [
            GroupedQueryAttention(
                build,
                width=WIDTH,
                heads=HEADS,
                kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                cos_sin=self._cos_sin,
                eps=EPS,
            )
            for _ in range(LAYERS)
        ]
        self._experts = [RoutedExperts(build) for _ in range(LAYERS)]
        self.layers = build.layers

    def layer_parameters(self) -> dict[str, Parameter]:
        """Attention and experts."""
        found: dict[str, Parameter] = {}
        for at, (attention, moe) in enumerate(zip(self._attention, self._experts, strict=True)):
            found |= {f"{at}.qkv": attention.qkv, f"{at}.out": attention.out}
            found[f"{at}.router"] = moe.router
            for name, expert in {"shared": moe.shared, **dict(_numbered(moe.experts))}.items():
                found[f"{at}.{name}.gate_up"] = expert.gate_up
                found[f"{at}.{name}.down"] = expert.down
        return found

    def regions(self) -> Manifest:
        """Attention, once a layer."""
        return Manifest.of(("gqa_attention", LAYERS))

    def bind_caches(self, views: Mapping[str, Sequence[Tensor]]) -> None:
        """Give each layer its views."""
        for layer, keys, values in zip(
            self._attention, views["keys"], views["values"], strict=True
        ):
            layer.bind_caches(keys, values)

    def attend(self, residual: Tensor, norm: RMSNorm, layer: int, step: StepInputs) -> Tensor:
        """Grouped-query attention."""
        added = self._attention[layer](None, residual, norm, step)
        assert added is not None, "on a CPU products are left pending"
        return added

    def feed(self, x: Tensor, layer: int) -> Tensor:
        """Routed experts."""
        return self._experts[layer](x)


@eager_region("tiny_pick_blocks", outs=("picked",))
def tiny_pick_blocks(q: Tensor, picked: Tensor, layer: int) -> None:
    """Mark the blocks each row wants most. q: [tokens, heads, head_dim]; picked: [tokens, blocks] bool."""
    context = current()
    attention = context.layers[layer]
    assert isinstance(attention, SparseAttention), f"layer {layer} is {attention!r}"
    attention.pick(q, picked, context)


@eager_region("tiny_sparse_attention", outs=("out",))
def tiny_sparse_attention(q: Tensor, picked: Tensor, out: Tensor, layer: int) -> None:
    """Attend over the window and the marked blocks. q, out: [tokens, heads, head_dim]."""
    context = current()
    attention = context.layers[layer]
    assert isinstance(attention, SparseAttention), f"layer {layer} is {attention!r}"
    attention.attend(q, picked, out, context)


class SparseAttention:
    """Attends over the newest `WINDOW_TOKENS` and the `PICKED_BLOCKS` whose keys suit the query best."""

    keys: Tensor
    """[blocks, kv_heads, block_tokens, head_dim], like values."""
    values: Tensor

    def __init__(self, build: Build, cos_sin: Tensor) -> None:
        rows = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        self.qkv = Linear(build, WIDTH, rows)
        self.out = Linear(build, HEADS * HEAD_DIM, (WIDTH,))
        self._cos_sin = cos_sin
        self._rotate_and_cache = build.bind(rotate_and_cache)
        self._number = build.enroll(self)

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """x: [tokens, WIDTH]; returns the same shape. Writes this step's keys and values."""
        rows = step.rows[GROUP]
        q = self._rotate_and_cache(
            self.qkv(x),
            step.positions,
            self._cos_sin,
            self.keys,
            self.values,
            rows.write_slots,
            None,
            None,
            EPS,
        )
        blocks = rows.block_table.shape[1]
        picked = torch.empty(x.shape[0], blocks, dtype=torch.bool, device=x.device)
        tiny_pick_blocks(q, picked, self._number)
        out = torch.empty_like(q)
        tiny_sparse_attention(q, picked, out, self._number)
        return self.out(out.view(-1, HEADS * HEAD_DIM))

    def pick(self, q: Tensor, picked: Tensor, context: StepContext) -> None:
        """The body of the indexer: a block is as good as its best visible key."""
        rows, tokens = context.inputs.rows[GROUP], q.shape[0]
        request, in_use = self._request_of_row(rows, context.inputs, tokens)
        scores, seen = self._scores(q, request, context)
        best = (
            scores.masked_fill(~seen, float("-inf")).unflatten(1, (-1, rows.block_tokens)).amax(2)
        )
        unused = torch.arange(best.shape[1], device=q.device) >= in_use[:, None]
        best = best.masked_fill(unused, float("-inf"))
        chosen = best.topk(min(PICKED_BLOCKS, best.shape[1]), dim=-1).indices
        picked.zero_()
        picked.scatter_(1, chosen, True)
        picked &= ~unused
        picked[context.attn.tokens :] = False

    def attend(self, q: Tensor, picked: Tensor, out: Tensor, context: StepContext) -> None:
        """The body of attention."""
        rows, tokens = context.inputs.rows[GROUP], q.shape[0]
        request, in_use = self._request_of_row(rows, context.inputs, tokens)
        scores, seen = self._scores(q, request, context)
        # Sharper where a request is long, so that a wrong count shows in every row.
        scores = scores * (1.0 + 0.25 * in_use[:, None])
        at = torch.arange(scores.shape[1], device=q.device)
        near = at > context.inputs.positions[:, None] - WINDOW_TOKENS
        seen = seen & (near | picked.repeat_interleave(rows.block_tokens, dim=1))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).masked_fill(~seen, 0.0)
        values = self._of_request(self.values, request, rows).masked_fill(~seen[..., None], 0.0)
        mixed = (weights[..., None] * values).sum(1)
        out.copy_(mixed[:, None].expand_as(out))
        hand_back(context, out)

    def tables(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Running sums of blocks in use and tiles of query rows, as derived for this forward."""
        return rows.indptrs(), rows.unit_tiles(TILE_ROWS)

    def _request_of_row(self, rows: Rows, inputs: StepInputs, tokens: int) -> tuple[Tensor, Tensor]:
        """The request of every token row, 0 behind the last, and the blocks it uses. int64 and int32 [tokens]."""
        starts, tiles = self.tables(rows)
        request = tiles[:, 0].clamp(min=0)
        row = tiles[:, 1:] + torch.arange(TILE_ROWS, dtype=torch.int32, device=tiles.device)
        last = inputs.query_starts.index_select(0, request + 1)
        real = (tiles[:, :1] >= 0) & (row < last[:, None])
        places = torch.where(real, row, tokens).flatten().long()
        found = torch.zeros(tokens + 1, dtype=torch.int64, device=tiles.device)
        found.scatter_(0, places, request.long()[:, None].expand_as(row).flatten())
        found = found[:tokens]
        return found, (starts[1:] - starts[:-1]).index_select(0, found)

    def _scores(self, q: Tensor, request: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        """Of every row with every cached position of its request, and which of them it may see; [tokens, positions]."""
        keys = self._of_request(self.keys, request, context.inputs.rows[GROUP])
        scores = (q.mean(1)[:, None] * keys).sum(-1)
        at = torch.arange(keys.shape[1], device=q.device)
        return scores, at <= context.inputs.positions[:, None]

    def _of_request(self, cache: Tensor, request: Tensor, rows: Rows) -> Tensor:
        """Cached vectors of every row's request, the mean over heads: [tokens, positions, head_dim]."""
        blocks = rows.block_table.index_select(0, request).long()
        return cache[blocks].mean(2).flatten(1, 2)


class TinySparse(TinyDecoder):
    """Sparse attention with an indexer, and a gated MLP."""

    architectures = ("TinySparseForTests",)

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self._attention = [SparseAttention(build, self._cos_sin) for _ in range(LAYERS)]
        self._mlps = [GatedMLP(build, WIDTH, 2 * WIDTH) for _ in range(LAYERS)]
        self.layers = build.layers

    def layer_parameters(self) -> dict[str, Parameter]:
        """Attention and MLPs."""
        found: dict[str, Parameter] = {}
        for at, (attention, mlp) in enumerate(zip(self._attention, self._mlps, strict=True)):
            found |= {f"{at}.qkv": attention.qkv, f"{at}.out": attention.out}
            found |= {f"{at}.gate_up": mlp.gate_up, f"{at}.down": mlp.down}
        return found

    def regions(self) -> Manifest:
        """The indexer, then attention, in every layer."""
        return Manifest.of(*["tiny_pick_blocks", "tiny_sparse_attention"] * LAYERS)

    def bind_caches(self, views: Mapping[str, Sequence[Tensor]]) -> None:
        """Give each layer its views."""
        for layer, keys, values in zip(
            self._attention, views["keys"], views["values"], strict=True
        ):
            layer.keys, layer.values = keys, values

    def attend(self, residual: Tensor, norm: RMSNorm, layer: int, step: StepInputs) -> Tensor:
        """Sparse attention."""
        return self._attention[layer](norm(residual), step)

    def feed(self, x: Tensor, layer: int) -> Tensor:
        """A gated MLP."""
        return self._mlps[layer].feed(x)


def _numbered(experts: Sequence[GatedMLP]) -> list[tuple[str, GatedMLP]]:
    return [(f"expert{at}", expert) for at, expert in enumerate(experts)]


def a_real_family(config: Mapping[str, object]) -> Callable[[Build], Model]:
    """A model of a checkpoint's config with the tiny weights, each time it is built."""
    return lambda build: a_model(config, tiny_weights(config), build)


def a_small_v4_1(build: Build) -> Model:
    """DeepSeek V4.1 with few layers of every kind."""
    return a_v4_1(build, **SMALL)


FAMILIES: dict[str, Callable[[Build], Model]] = {
    "llama": a_real_family(llama_config()),
    "mistral": a_real_family(mistral_config()),
    "qwen3": a_real_family(qwen3_config(head_dim=32)),
    "qwen3-moe": a_real_family(qwen3_moe_config(head_dim=32)),
    "deepseek-v4": lambda build: a_model(v4_config(), weights_of(v4_config()), build),
    "deepseek-v4.1": a_small_v4_1,
    "moe": TinyMoE,
    "sparse": TinySparse,
}
"""Models by name; those of a real family have their weights, the others are filled by whoever builds them."""
