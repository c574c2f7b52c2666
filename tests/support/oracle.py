"""What is the right answer? One request, one token at a time, float32, plain torch.

Written without `tokamak`: it has its own reader (`oracle_files.py`), attention and cache (dense
keys and values that grow), so an agreement with the engine is two readings of the same model.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from tests.support.oracle_files import read_weights


@dataclass(frozen=True, slots=True)
class OracleOutput:
    """Greedy tokens, the stop token included, and the log-probabilities each was chosen from."""

    token_ids: list[int]
    logprobs: Tensor  # [tokens, vocab]


class Oracle:
    """Llama, Mistral and Qwen3, dense and with experts, from a folder with config.json or a .gguf file."""

    def __init__(self, path: Path) -> None:
        self.config, self.weights = read_weights(path)
        c = self.config
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.head_dim = c.get("head_dim") or c["hidden_size"] // self.heads
        self.frequencies = _frequencies(c, self.head_dim)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def generate(
        self, prompt_ids: Sequence[int], max_tokens: int, eos_ids: Container[int] = ()
    ) -> OracleOutput:
        """Continue a prompt with the most likely tokens until a stop token or `max_tokens`."""
        rows: list[Tensor] = []
        token_ids: list[int] = []
        scores = self.scores(prompt_ids)
        while len(token_ids) < max_tokens:
            rows.append(scores[-1].log_softmax(-1))
            token_ids.append(int(rows[-1].argmax()))
            if token_ids[-1] in eos_ids:
                break
            scores = self._forward(token_ids[-1:])
        return OracleOutput(token_ids, torch.stack(rows))

    def scores(self, token_ids: Sequence[int]) -> Tensor:
        """Scores at every position of a fresh request: [tokens, vocab]."""
        shape = (self.kv_heads, 0, self.head_dim)
        self.keys = [torch.empty(shape) for _ in range(self.config["num_hidden_layers"])]
        self.values = [torch.empty(shape) for _ in self.keys]
        return self._forward(token_ids)

    @torch.inference_mode()
    def _forward(self, token_ids: Sequence[int]) -> Tensor:
        x = self.weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            x = x + self._attention(self._norm(x, f"{at}.input_layernorm"), layer)
            y = self._norm(x, f"{at}.post_attention_layernorm")
            routed = f"{at}.mlp.gate.weight" in self.weights
            x = x + (self._routed(y, f"{at}.mlp") if routed else self._mlp(y, f"{at}.mlp"))
        tied = "lm_head.weight" not in self.weights
        return self._linear(
            self._norm(x, "model.norm"), "model.embed_tokens" if tied else "lm_head"
        )

    def _mlp(self, y: Tensor, at: str) -> Tensor:
        gate, up = self._linear(y, f"{at}.gate_proj"), self._linear(y, f"{at}.up_proj")
        return self._linear(silu(gate) * up, f"{at}.down_proj")

    def _routed(self, y: Tensor, at: str) -> Tensor:
        """Token by token: its likeliest experts, each weighed by its probability."""
        c, rows = self.config, []
        for token, chances in zip(y, self._linear(y, f"{at}.gate").softmax(-1), strict=True):
            best = sorted(range(c["num_experts"]), key=lambda e: -float(chances[e]))
            best = best[: c["num_experts_per_tok"]]
            total = sum(float(chances[e]) for e in best) if c["norm_topk_prob"] else 1.0
            parts = [chances[e] / total * self._mlp(token, f"{at}.experts.{e}") for e in best]
            rows.append(torch.stack(parts).sum(0))
        return torch.stack(rows)

    def _attention(self, x: Tensor, layer: int) -> Tensor:
        at = f"model.layers.{layer}.self_attn"
        past, tokens = self.keys[layer].shape[1], x.shape[0]
        q, k, v = (
            self._linear(x, f"{at}.{n}_proj").view(tokens, -1, self.head_dim).transpose(0, 1)
            for n in "qkv"
        )
        if f"{at}.q_norm.weight" in self.weights:
            q, k = self._norm(q, f"{at}.q_norm"), self._norm(k, f"{at}.k_norm")
        positions = torch.arange(past, past + tokens)
        self.keys[layer] = torch.cat([self.keys[layer], self._rotate(k, positions)], dim=1)
        self.values[layer] = torch.cat([self.values[layer], v], dim=1)
        shared = self.heads // self.kv_heads
        keys = self.keys[layer].repeat_interleave(shared, dim=0)
        values = self.values[layer].repeat_interleave(shared, dim=0)
        scores = self._rotate(q, positions) @ keys.transpose(1, 2) / math.sqrt(self.head_dim)
        distance = positions[:, None] - torch.arange(past + tokens)[None, :]
        seen = distance >= 0
        if self._window(layer):
            seen &= distance < self._window(layer)
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
        return self._linear(mixed.transpose(0, 1).reshape(tokens, -1), f"{at}.o_proj")

    def _window(self, layer: int) -> int:
        c = self.config
        if c["model_type"] == "qwen3_moe" and not c.get("use_sliding_window"):
            return 0
        if c["model_type"] == "qwen3" and (
            not c.get("use_sliding_window") or layer < c.get("max_window_layers", 28)
        ):
            return 0
        return c.get("sliding_window") or 0

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = (positions[:, None] * self.frequencies).repeat(1, 2)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return (x * angles.cos() + turned * angles.sin()).float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        size = x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return x / size.sqrt() * self.weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


def _frequencies(config: dict, head_dim: int) -> Tensor:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta", 10000.0)
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "linear":
        plain = [f / rope["factor"] for f in plain]
    elif kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        for i, f in enumerate(plain):
            turns = rope["original_max_position_embeddings"] * f / (2 * math.pi)
            kept = min(max((turns - low) / (high - low), 0.0), 1.0)
            plain[i] = kept * f + (1 - kept) * f / rope["factor"]
    elif kind != "default":
        raise ValueError(f"the oracle knows no rope type {kind!r}")
    return torch.tensor(plain, dtype=torch.float64)
