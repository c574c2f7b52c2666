"""Where are the scales of 8-bit floating-point weights, and what does each of them hold for?

Checkpoints of fp8 keep a tensor of scales beside each weight, and say in their config's `quantization_config`
what it is called. Here the two are joined to one entry, so that models see tensors of the names they know. What
is not understood is refused: numbers read with the wrong scales are wrong without a sign of it. Activations
stay in the model's dtype, so how the makers meant to round them is of no effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

from tokamak.checkpoint.entry import PLAIN_FORMATS, SCALED_FORMATS, Scales, TensorEntry
from tokamak.errors import CheckpointError, UnsupportedModelError

FIELDS = ("quantization_config", "compression_config")
WEIGHT = ".weight"
PLAIN_MODULES = ("embed_tokens", "lm_head", "gate")
"""Embeddings, heads and routers, which nobody stores in 8 bits."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights of a checkpoint are scaled."""

    suffix: str
    """The name of a weight's scales, in place of `weight`."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None for one scale a row or a tensor, as its shape says."""
    left_out: tuple[str, ...] = ()
    """Modules whose weights stay as they were: whole names or their ends, or behind `re:` a pattern."""

    def covers(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a checkpoint made so has this tensor in 8 bits: a linear layer's matrix that is not left out."""
        module = name.removesuffix(WEIGHT)
        return (
            name.endswith(WEIGHT)
            and len(shape) == 2
            and module.rsplit(".", 1)[-1] not in PLAIN_MODULES
            and not any(_names(left, module) for left in self.left_out)
        )


def _names(left: str, module: str) -> bool:
    """Whether an entry of a list of exceptions means a module, or one that holds it."""
    if left.startswith("re:"):
        return re.match(left[3:], module) is not None
    return f".{left}." in f".{module}."


def join_scales(
    path: Path, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]
) -> tuple[dict[str, Any], dict[str, TensorEntry], Scheme | None]:
    """The config without what is said about scales, the entries with each weight's scales in it, and what was said.

    Raises:
        CheckpointError: a weight's scales are missing or have another shape than its blocks make.
        UnsupportedModelError: the weights are quantised by a method that we do not read.
    """
    rest = {name: value for name, value in config.items() if name not in FIELDS}
    said = next((config[name] for name in FIELDS if config.get(name)), None)
    if said is None:
        return rest, dict(entries), None
    scheme = _scheme(path, said)
    joined = dict(entries)
    for name, entry in entries.items():
        if entry.format.name in SCALED_FORMATS and name.endswith(WEIGHT):
            scales = joined.pop(name.removesuffix("weight") + scheme.suffix, None)
            joined[name] = _with_scales(entry, scales, scheme)
    return rest, joined, scheme


def _scheme(path: Path, said: Any) -> Scheme:
    method = said.get("quant_method") if isinstance(said, dict) else said
    found = None
    if isinstance(said, dict):
        fields = cast("dict[str, Any]", said)
        if method == "fp8":
            found = _of_fp8(fields)
        elif method == "compressed-tensors":
            found = _of_compressed(fields)
    if found is None:
        raise UnsupportedModelError(
            f"{path} says the weights are quantised by {method!r} (quantization_config), which "
            "is not supported as it stands there",
            hint="read are fp8 with activation_scheme dynamic, and compressed-tensors of 8-bit floats; else use "
            "the unquantised model, or a GGUF of it",
        )
    left_out = said.get("modules_to_not_convert") or said.get("ignore") or ()
    return replace(found, left_out=tuple(str(name) for name in left_out))


def _of_fp8(said: Mapping[str, Any]) -> Scheme | None:
    if said.get("activation_scheme", "dynamic") != "dynamic" or said.get("fmt") not in (
        None,
        "e4m3",
    ):
        return None
    match said.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Scheme("weight_scale_inv", (rows, columns))
        case None:
            return Scheme("weight_scale", None)
        case _:
            return None


def _of_compressed(said: Mapping[str, Any]) -> Scheme | None:
    groups = said.get("config_groups")
    if not isinstance(groups, dict) or said.get("kv_cache_scheme"):
        return None
    found: set[Scheme | None] = {
        _of_group(group) for group in cast("dict[str, Any]", groups).values()
    }
    return found.pop() if len(found) == 1 else None


def _of_group(group: Any) -> Scheme | None:
    match group:
        case {"weights": {"num_bits": 8, "type": "float", **weights}}:
            inputs = group.get("input_activations") or {"dynamic": True}
        case _:
            return None
    if not weights.get("symmetric", True) or not inputs.get("dynamic"):
        return None
    match weights:
        case {"strategy": "channel" | "tensor"}:
            return Scheme("weight_scale", None)
        case {"strategy": "block", "block_structure": [int(rows), int(columns)]}:
            return Scheme("weight_scale", (rows, columns))
        case _:
            return None


def _with_scales(entry: TensorEntry, scales: TensorEntry | None, scheme: Scheme) -> TensorEntry:
    if scales is None:
        raise CheckpointError(
            f"tensor {entry.where} has 8-bit numbers and no tensor of scales, which the config says is called "
            f"{scheme.suffix}",
            hint="the weights are incomplete",
        )
    if len(entry.shape) != 2:
        raise UnsupportedModelError(
            f"tensor {entry.where} has shape {list(entry.shape)}; of 8-bit tensors only matrices are supported"
        )
    rows, columns = entry.shape
    block = scheme.block or (rows if prod(scales.shape) == 1 else 1, columns)
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    # One scale a row or a tensor may be written without the axes that have no length.
    same = {expected} if scheme.block else {expected, expected[:1]}
    if scheme.block is None and expected == (1, 1):
        same |= {()}
    if scales.shape not in same or scales.format.name not in PLAIN_FORMATS:
        raise CheckpointError(
            f"tensor {scales.where} has shape {list(scales.shape)} and the number format "
            f"{scales.format.name}; expected {list(expected)} scales in {', '.join(PLAIN_FORMATS)}",
            hint="quantization_config belongs to other weights",
        )
    return replace(entry, scales=Scales(scales, expected, block))
