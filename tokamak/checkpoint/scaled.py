"""Where are the scales of 8- and 4-bit floating-point weights, and what does each of them hold for?

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

from tokamak.checkpoint.entry import (
    PACKED_FORMAT,
    PLAIN_FORMATS,
    SCALE_FORMATS,
    SCALED_FORMATS,
    Scales,
    TensorEntry,
)
from tokamak.errors import CheckpointError, UnsupportedModelError

FIELDS = ("quantization_config", "compression_config")
WEIGHT = ".weight"
PLAIN_MODULES = ("embed_tokens", "lm_head", "gate", "embed", "head")
"""Embeddings, heads and routers, which nobody stores in 8 bits."""
PACKED_BYTES = "I8"
"""What safetensors files call bytes that hold two 4-bit numbers."""
TABLES = ("engram.embed",)
"""Tables of n-grams, which are in 8 bits with powers of two for 32 columns of a row, whatever blocks matrices have."""
GROUP = 32
"""Columns of a row that share a power of two, in the microscaling formats."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights of a checkpoint are scaled."""

    suffixes: tuple[str, ...]
    """Names of a weight's scales, in place of `weight`; it has one of them."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None for one scale a row or a tensor, as its shape says."""
    powers: bool = False
    """Whether scales are powers of two: they may be stored as bytes, and be shared by 32 columns of one row."""
    packed: bool = False
    """Whether bytes hold two 4-bit numbers, with a power of two for 32 columns of a row."""
    left_out: tuple[str, ...] = ()
    """Modules whose weights stay as they were: whole names or their ends, or behind `re:` a pattern."""

    @property
    def scale_formats(self) -> tuple[str, ...]:
        """Number formats that scales may be stored in."""
        return SCALE_FORMATS if self.powers else PLAIN_FORMATS

    def covers(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a checkpoint made so has this tensor in 8 bits: a linear layer's matrix that is not left out."""
        module = name.removesuffix(WEIGHT)
        plain = module.rsplit(".", 1)[-1] in PLAIN_MODULES and not self._is_table(module)
        return (
            name.endswith(WEIGHT)
            and len(shape) == 2
            and not plain
            and not any(_names(left, module) for left in self.left_out)
        )

    def block_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns that share a scale in a tensor that is covered."""
        if self._is_table(name.removesuffix(WEIGHT)):
            return 1, GROUP
        return self.block or (1, shape[1])

    def _is_table(self, module: str) -> bool:
        return self.powers and module.endswith(TABLES)


def is_table(name: str) -> bool:
    """Whether a tensor is a table of n-grams."""
    return name.removesuffix(WEIGHT).endswith(TABLES)


def table_bytes(numbers: int, scheme: Scheme | None, number_bytes: int) -> int:
    """What so many numbers of such tables take: in 8 bits with their scales, or in plain numbers of so many bytes."""
    if scheme is not None and scheme.powers:
        return numbers + -(-numbers // GROUP)
    return numbers * number_bytes


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
    scheme = _scheme(path, config, said)
    joined = dict(entries)
    for name, entry in entries.items():
        packed = scheme.packed and entry.format.name == PACKED_BYTES
        if name.endswith(WEIGHT) and (packed or entry.format.name in SCALED_FORMATS):
            scales = _scales_of(entry, entries, scheme)
            del joined[scales.name]
            joined[name] = _packed(entry, scales) if packed else _with_scales(entry, scales, scheme)
    return rest, joined, scheme


def _scheme(path: Path, config: Mapping[str, Any], said: Any) -> Scheme:
    method = said.get("quant_method") if isinstance(said, dict) else said
    found = None
    if isinstance(said, dict):
        fields = cast("dict[str, Any]", said)
        if method == "fp8":
            found = _of_fp8(fields, _expert_dtype(config, fields))
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


def _expert_dtype(config: Mapping[str, Any], said: Mapping[str, Any]) -> Any:
    """What DeepSeek's configs say of experts, in one of three places, or nothing."""
    places = (said, config, config.get("text_config") or {})
    return next((place["expert_dtype"] for place in places if place.get("expert_dtype")), None)


def _of_fp8(said: Mapping[str, Any], expert_dtype: Any) -> Scheme | None:
    if said.get("activation_scheme", "dynamic") != "dynamic" or said.get("fmt") not in (
        None,
        "e4m3",
    ):
        return None
    powers = said.get("scale_fmt") == "ue8m0"
    if (said.get("scale_fmt") and not powers) or expert_dtype not in (None, "fp4", "fp8"):
        return None
    match said.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            suffixes = ("weight_scale_inv", "scale")
            return Scheme(suffixes, (rows, columns), powers, powers and expert_dtype != "fp8")
        case None:
            return Scheme(("weight_scale",), None)
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
            return Scheme(("weight_scale",), None)
        case {"strategy": "block", "block_structure": [int(rows), int(columns)]}:
            return Scheme(("weight_scale",), (rows, columns))
        case _:
            return None


def _scales_of(
    entry: TensorEntry, entries: Mapping[str, TensorEntry], scheme: Scheme
) -> TensorEntry:
    """The tensor of a weight's scales."""
    stem = entry.name.removesuffix("weight")
    found = [entries[stem + suffix] for suffix in scheme.suffixes if stem + suffix in entries]
    names = " or ".join(scheme.suffixes)
    if not found:
        raise CheckpointError(
            f"tensor {entry.where} has {entry.format.name} numbers and no tensor of scales, which the config says "
            f"is called {names}",
            hint="the weights are incomplete",
        )
    if len(found) > 1:
        raise CheckpointError(
            f"tensor {entry.where} has two tensors of scales, {found[0].name} and {found[1].name}",
            hint="remove the one that belongs to other weights",
        )
    if len(entry.shape) != 2:
        raise UnsupportedModelError(
            f"tensor {entry.where} has shape {list(entry.shape)}; of 8- and 4-bit tensors only matrices are supported"
        )
    return found[0]


def _with_scales(entry: TensorEntry, scales: TensorEntry, scheme: Scheme) -> TensorEntry:
    """An 8-bit weight with its scales."""
    rows, columns = entry.shape
    block = scheme.block or (rows if prod(scales.shape) == 1 else 1, columns)
    if scheme.powers and scales.shape == _blocks_of(entry, (1, GROUP)):
        block = (1, GROUP)
    expected = _blocks_of(entry, block)
    # One scale a row or a tensor may be written without the axes that have no length.
    same = {expected} if scheme.block else {expected, expected[:1]}
    if scheme.block is None and expected == (1, 1):
        same |= {()}
    _check_scales(scales, scales.shape if scales.shape in same else expected, scheme.scale_formats)
    return replace(entry, scales=Scales(scales, expected, block))


def _blocks_of(entry: TensorEntry, block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks of rows and of columns a weight has; those at its edges may be smaller."""
    rows, columns = entry.shape
    return -(-rows // block[0]), -(-columns // block[1])


def _packed(entry: TensorEntry, scales: TensorEntry) -> TensorEntry:
    """A 4-bit weight with its scales: two columns a byte."""
    rows, columns = entry.shape[0], 2 * entry.shape[1]
    if columns % GROUP:
        raise CheckpointError(
            f"tensor {entry.where} has {columns} columns in {entry.shape[1]} bytes a row; expected whole groups of {GROUP}"
        )
    shape = (rows, columns // GROUP)
    _check_scales(scales, shape, SCALE_FORMATS)
    joined = Scales(scales, shape, (1, GROUP))
    return replace(entry, shape=(rows, columns), format=PACKED_FORMAT, scales=joined)


def _check_scales(scales: TensorEntry, shape: tuple[int, ...], formats: tuple[str, ...]) -> None:
    if scales.shape != shape or scales.format.name not in formats:
        raise CheckpointError(
            f"tensor {scales.where} has shape {list(scales.shape)} and the number format "
            f"{scales.format.name}; expected {list(shape)} scales in {', '.join(formats)}",
            hint="quantization_config belongs to other weights",
        )
