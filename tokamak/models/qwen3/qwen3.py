"""The Qwen3 decoder without experts: what it keeps, where its weights are, and how tokens become scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from tokamak.cache.sub_cache import SubCache
from tokamak.core.inputs import StepInputs
from tokamak.graphs.region import Manifest
from tokamak.layers.attention.gqa import CACHE_DTYPES, GroupedQueryAttention
from tokamak.layers.build import Build
from tokamak.layers.embedding import Embedding, Head
from tokamak.layers.mlp import GatedMLP
from tokamak.layers.model import Model, Parameter
from tokamak.layers.moe import ExpertsMLP
from tokamak.layers.norm import RMSNorm
from tokamak.models.qwen3.config import Qwen3Config
from tokamak.ops.norm import add_residual

Weights = dict[str, tuple[Parameter, tuple[str, ...]]]
MLP = GatedMLP | ExpertsMLP


class Qwen3Layer:
    """One decoder layer: attention, then its MLP, each behind a norm of the residual stream."""

    def __init__(
        self,
        config: Qwen3Config,
        build: Build,
        cos_sin: Tensor,
        window: int,
        make_mlp: Callable[[], MLP],
    ) -> None:
        c = config
        self.attention_norm = RMSNorm(build, c.width, c.norm_eps)
        self.attention = GroupedQueryAttention(
            build,
            width=c.width,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            cos_sin=cos_sin,
            eps=c.norm_eps,
            window_tokens=window,
            head_norms=True,
            qkv_bias=c.attention_bias,
            out_bias=c.attention_bias,
        )
        self.mlp_norm = RMSNorm(build, c.width, c.norm_eps)
        self.mlp = make_mlp()

    def __call__(self, x: Tensor | None, residual: Tensor, step: StepInputs) -> Tensor | None:
        """Add what the layer before left pending (None: nothing), and leave this layer's part pending or added.

        x, residual: [tokens, width]; residual is updated in place. Returns [tokens, width] or None.
        """
        x = self.attention(x, residual, self.attention_norm, step)
        return self.mlp(x, residual, self.mlp_norm)


class Qwen3(Model):
    """Qwen3 dense: grouped-query attention whose queries and keys are normed per head, gated MLPs."""

    architectures = ("Qwen3ForCausalLM",)
    cache_dtypes = CACHE_DTYPES

    def __init__(self, config: Qwen3Config, build: Build) -> None:
        super().__init__()
        c = config
        self.config = c
        self._cache_dtype = build.cache_dtype
        cos_sin = c.rope.table(build.max_model_len, build.device)
        self._head = Head(build, c.vocab_tokens, c.width)
        tied = self._head if c.tied_head else None
        self._embedding = Embedding(build, c.vocab_tokens, c.width, head=tied)
        self._layers = tuple(
            Qwen3Layer(
                c,
                build,
                cos_sin,
                window if window < build.max_model_len else 0,
                partial(self._make_mlp, layer, build),
            )
            for layer, window in enumerate(c.windows)
        )
        self._add_residual = build.bind(add_residual)
        self._final_norm = RMSNorm(build, c.width, c.norm_eps)
        self.layers = build.layers

    @classmethod
    def from_config(cls, config: Mapping[str, object], build: Build) -> Qwen3:
        """Build the decoder a Hugging Face config describes, without weights.

        Raises:
            UnsupportedModelError: a field asks for arithmetic we do not have.
            CheckpointError: a field is missing or of the wrong type.
        """
        return cls(Qwen3Config.read(config, cls.architectures[0]), build)

    def sub_caches(self) -> tuple[SubCache, ...]:
        """Keys and values of every layer; where all layers have a window, no more than it is kept."""
        c = self.config
        every = tuple(range(c.layers))
        keep = max(c.windows) if all(c.windows) else 0
        return tuple(
            SubCache(name, every, c.kv_heads, c.head_dim, self._cache_dtype, keep_tokens=keep)
            for name in ("keys", "values")
        )

    def weights(self) -> Mapping[str, tuple[Parameter, tuple[str, ...]]]:
        """Every parameter: where it lives, and the checkpoint tensors it is made of."""
        found: Weights = {
            "embedding": (self._embedding, ("model.embed_tokens.weight",)),
            "final_norm": (self._final_norm.weight, ("model.norm.weight",)),
        }
        if not self.config.tied_head:
            found["head"] = (self._head, ("lm_head.weight",))
        for index, layer in enumerate(self._layers):
            at, source = f"layers.{index}", f"model.layers.{index}"
            attention = tuple(f"{source}.self_attn.{name}_proj" for name in "qkv")
            linears = (
                (f"{at}.qkv", layer.attention.qkv, attention),
                (f"{at}.out", layer.attention.out, (f"{source}.self_attn.o_proj",)),
            )
            for name, linear, sources in linears:
                found[name] = (linear, tuple(f"{tensor}.weight" for tensor in sources))
                if linear.bias is not None:
                    biases = tuple(f"{tensor}.bias" for tensor in sources)
                    found[f"{name}_bias"] = (linear.bias, biases)
            norms = (
                (f"{at}.attention_norm", layer.attention_norm.weight, "input_layernorm"),
                (f"{at}.mlp_norm", layer.mlp_norm.weight, "post_attention_layernorm"),
                (f"{at}.q_norm", layer.attention.q_norm, "self_attn.q_norm"),
                (f"{at}.k_norm", layer.attention.k_norm, "self_attn.k_norm"),
            )
            for name, norm, tensor in norms:
                assert norm is not None, f"{name} was not built"
                found[name] = (norm, (f"{source}.{tensor}.weight",))
            found |= self._mlp_weights(layer.mlp, at, f"{source}.mlp")
        return found

    def optional_weights(self) -> frozenset[str]:
        """A copy of a tied head."""
        return frozenset({"lm_head.weight"} if self.config.tied_head else ())

    def regions(self) -> Manifest:
        """Attention, once a layer."""
        return Manifest.of(("gqa_attention", self.config.layers))

    def bind_caches(self, views: Mapping[str, Sequence[Tensor]]) -> None:
        """Give each layer its views of keys and values."""
        for layer, keys, values in zip(self._layers, views["keys"], views["values"], strict=True):
            layer.attention.bind_caches(keys, values)

    def forward(self, step: StepInputs) -> Tensor:
        """The residual stream after the last layer, before the final norm: [tokens, width]."""
        residual = self._embedding(step.token_ids)
        x = None
        for layer in self._layers:
            x = layer(x, residual, step)
        return residual if x is None else self._add_residual(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary scores of some hidden rows: [rows, width] to [rows, vocab], float32."""
        return self._head.after_norm(hidden, self._final_norm)

    def _make_mlp(self, layer: int, build: Build) -> MLP:
        """What stands behind the attention of a layer."""
        return GatedMLP(build, self.config.width, self.config.inner_width)

    def _mlp_weights(self, mlp: MLP, at: str, source: str) -> Weights:
        """The parameters of a layer's MLP, and the checkpoint tensors that start with `source`."""
        return mlp_weights(mlp, at, (source,))


def mlp_weights(mlp: MLP, at: str, sources: Sequence[str]) -> Weights:
    """Both projections, made of those of one MLP or of all experts in order."""
    return {
        f"{at}.{name}": (
            part,
            tuple(f"{source}.{tensor}_proj.weight" for source in sources for tensor in tensors),
        )
        for name, part, tensors in (
            ("gate_up", mlp.gate_up, ("gate", "up")),
            ("down", mlp.down, ("down",)),
        )
    }
