"""Which model family answers to an architecture name.

Families are named by import string and imported when asked for, so that one family's import error or
cost is never another's.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol, cast

from tokamak.errors import UnsupportedModelError
from tokamak.layers.build import Build
from tokamak.layers.model import Model

FAMILIES: dict[str, str] = {
    "DeepseekV4ForCausalLM": "tokamak.models.deepseek_v4.v4:DeepseekV4",
    "DeepseekV41ForCausalLM": "tokamak.models.deepseek_v4.v4_1:DeepseekV41",
    "LlamaForCausalLM": "tokamak.models.llama.llama:Llama",
    "MistralForCausalLM": "tokamak.models.llama.llama:Llama",
    "Qwen3ForCausalLM": "tokamak.models.qwen3.qwen3:Qwen3",
    "Qwen3MoeForCausalLM": "tokamak.models.qwen3.qwen3_moe:Qwen3Moe",
}
"""Architecture names, as `architectures` of a config.json has them, to module and class."""


class Family(Protocol):
    """The class of a model family."""

    architectures: tuple[str, ...]
    cache_dtypes: tuple[str, ...]

    def from_config(self, config: Mapping[str, object], build: Build) -> Model:
        """Build the model a Hugging Face config describes, without weights.

        Raises:
            UnsupportedModelError: a field asks for arithmetic the family does not have.
            CheckpointError: a field is missing or of the wrong type.
        """
        ...


def find(architecture: str) -> Family:
    """The family that implements an architecture.

    Raises:
        UnsupportedModelError: none does; the message names those there are.
    """
    place = FAMILIES.get(architecture)
    if place is None:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported",
            hint=f"supported: {', '.join(FAMILIES)}",
        )
    module, _, name = place.partition(":")
    return cast("Family", getattr(importlib.import_module(module), name))
