"""The Qwen3 decoder with experts: the dense one, with routed experts behind the attention of some layers."""

from __future__ import annotations

from collections.abc import Mapping

from tokamak.layers.build import Build
from tokamak.layers.moe import ExpertsMLP
from tokamak.models.qwen3.config import Qwen3MoeConfig
from tokamak.models.qwen3.qwen3 import MLP, Qwen3, Weights, mlp_weights


class Qwen3Moe(Qwen3):
    """Qwen3 with experts: grouped-query attention whose queries and keys are normed per head, routed gated MLPs."""

    architectures = ("Qwen3MoeForCausalLM",)

    def __init__(self, config: Qwen3MoeConfig, build: Build) -> None:
        self._moe = config
        super().__init__(config.dense, build)

    @classmethod
    def from_config(cls, config: Mapping[str, object], build: Build) -> Qwen3Moe:
        """Build the decoder a Hugging Face config describes, without weights.

        Raises:
            UnsupportedModelError: a field asks for arithmetic we do not have.
            CheckpointError: a field is missing or of the wrong type.
        """
        return cls(Qwen3MoeConfig.read(config, cls.architectures[0]), build)

    def _make_mlp(self, layer: int, build: Build) -> MLP:
        """Experts, or one gated MLP where the config wants no experts."""
        c = self._moe
        if not c.has_experts[layer]:
            return super()._make_mlp(layer, build)
        return ExpertsMLP(
            build,
            width=c.dense.width,
            inner_width=c.expert_width,
            experts=c.experts,
            chosen=c.chosen_experts,
            renormalise=c.renormalise,
        )

    def _mlp_weights(self, mlp: MLP, at: str, source: str) -> Weights:
        """Those of one layer's experts, expert by expert, and of its router; or of its one MLP."""
        if not isinstance(mlp, ExpertsMLP):
            return super()._mlp_weights(mlp, at, source)
        experts = [f"{source}.experts.{expert}" for expert in range(self._moe.experts)]
        return {
            f"{at}.router": (mlp.router, (f"{source}.gate.weight",)),
            **mlp_weights(mlp, at, experts),
        }
