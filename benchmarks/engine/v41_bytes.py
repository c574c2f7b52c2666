"""How many bytes must a decode step of DeepSeek V4.1 read at least? Weights in their loaded form, and its caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokamak.layers.build import Build
from tokamak.layers.model import Model
from tokamak.layers.moe import StackedExperts
from tokamak.models.deepseek_v4.config_v4_1 import V41Config

TABLES = ("embedding", ".table")
"""How names end of parameters of which a step reads single rows."""

DEPTH = 4
"""From a parameter to numbers: its parts, their form, what that packs, and the arrays in it."""


def loaded_bytes(model: Model) -> dict[str, int]:
    """Bytes of a loaded model's `experts`, `tables`, and `others`."""
    found = {"experts": 0, "tables": 0, "others": 0}
    for name, (parameter, _) in model.weights().items():
        held = sum(tensor.nbytes for tensor in _tensors(parameter, DEPTH))
        if isinstance(parameter, StackedExperts):
            found["experts"] += held
        else:
            found["tables" if name.endswith(TABLES) else "others"] += held
    return found


def experts_form(model: Model) -> str:
    """How routed experts are held, by their bytes a number."""
    numbers = held = 0
    for parameter, _ in model.weights().values():
        if isinstance(parameter, StackedExperts):
            numbers += sum(rows * width for rows, width in parameter.part_shapes)
            held += sum(tensor.nbytes for tensor in _tensors(parameter, DEPTH))
    each = held / numbers
    return "4 bits" if each < 0.75 else "8 bits" if each < 1.5 else f"widened to {each:.0f} bytes"


def _tensors(thing: object, depth: int) -> Iterable[Tensor | np.ndarray[Any, Any]]:
    """Tensors and arrays that an object holds, itself or through what it holds."""
    if isinstance(thing, Tensor | np.ndarray):
        yield thing
        return
    if not depth or isinstance(
        thing, Build | type | str | int | float | torch.dtype | torch.device
    ):
        return
    held: Iterable[object]
    if isinstance(thing, tuple | list):
        held = thing
    elif isinstance(thing, Mapping):
        held = thing.values()
    elif is_dataclass(thing):
        held = [getattr(thing, each.name) for each in fields(thing)]
    else:
        held = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    for each in held:
        yield from _tensors(each, depth - 1)


def step_bytes(
    config: V41Config, loaded: Mapping[str, int], *, requests: int, context: int, itemsize: int
) -> dict[str, int]:
    """Bytes a decode step reads at least, by kind, if every number is read once.

    Experts: those that `requests` rows meet on average if all are equally likely. Caches hold `itemsize` bytes a
    number, and `context` tokens of each request.
    """
    c, shared = config, config.shared
    missed = (1 - shared.chosen_experts / shared.experts) ** requests
    window = shared.layers * min(context, shared.window_tokens) * shared.head_dim
    entries = sum(
        min(context // ratio, shared.index_entries) * shared.head_dim for ratio in c.ratios if ratio
    )
    keys = 0
    for layer in c.index_sources:
        seen = context // c.ratios[layer]
        if 0 <= c.candidate_source < layer:
            seen = min(seen, c.candidate_blocks * c.block_entries)
        keys += seen * shared.index_dim
    return {
        "weights": loaded["others"],
        "experts": round(loaded["experts"] * (1 - missed)),
        "windows": requests * window * itemsize,
        "entries": requests * entries * itemsize,
        "index keys": requests * keys * itemsize,
    }
