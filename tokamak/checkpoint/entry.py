"""What is known of a stored tensor before it is read: its name, shape, number format and place.

Formats carry the names GGUF gives them; safetensors' names are mapped to these (`F32`, `BF16`, …).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from tokamak.errors import CheckpointError

GROUPED_FORMATS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}
"""Formats read as integers with a scale and minimum per 32 columns, with their bits."""

PLAIN_FORMATS = ("F32", "BF16", "F16")
"""Formats read as they are."""

TABLE_FORMATS = ("I64", "I32")
"""Whole numbers, read as they are: tables of ids."""

SCALED_FORMATS = ("F8_E4M3",)
"""Formats read as they are, whose scales are another tensor."""

SCALE_FORMATS = (*PLAIN_FORMATS, "F8_E8M0")
"""Formats of scales that are a tensor of their own."""

DEQUANTISED_FORMATS = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
"""Formats read as the float32 numbers they stand for."""


@dataclass(frozen=True, slots=True)
class Format:
    """A number format: a block of `block_numbers` takes `block_bytes`. Plain numbers are blocks of 1."""

    name: str
    block_numbers: int
    block_bytes: int

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor whose last axis is made of whole blocks."""
        return prod(shape) // self.block_numbers * self.block_bytes


PACKED_FORMAT = Format("E2M1", 2, 1)
"""Two numbers of 4 bits in a byte, whose scales are another tensor; safetensors files call the bytes I8."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint, not read yet."""

    name: str
    """Its Hugging Face name, such as `model.layers.0.self_attn.q_proj.weight`."""
    shape: tuple[int, ...]
    """[rows, columns] or [rows]; columns are the input features."""
    format: Format
    file: Path
    offset: int
    """Where its bytes begin in the file."""
    stored_name: str
    """Its name in the file."""
    interleaved_heads: int = 0
    """Heads whose rows alternate between the two halves of each rotary pair, as llama.cpp lays them
    out; 0 where rows are in the model's own order."""
    scales: Scales | None = None
    """What its numbers are multiplied with; None where they stand for themselves."""

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the file."""
        return self.format.bytes_of(self.shape)

    @property
    def bytes_with_scales(self) -> int:
        """Bytes it and its scales take in the checkpoint."""
        return self.nbytes + (self.scales.entry.nbytes if self.scales else 0)

    @property
    def where(self) -> str:
        """The tensor and its file, for messages."""
        alias = "" if self.stored_name == self.name else f" (stored as {self.stored_name})"
        return f"{self.name}{alias} in {self.file}"


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a tensor, which blocks of it share."""

    entry: TensorEntry
    shape: tuple[int, int]
    """Blocks of rows and of columns."""
    block: tuple[int, int]
    """Rows and columns of a block."""


def check_range(entry: TensorEntry, file_bytes: int) -> None:
    """Raise CheckpointError unless the tensor's bytes lie inside its file."""
    end = entry.offset + entry.nbytes
    if end > file_bytes:
        raise CheckpointError(
            f"{entry.file} is truncated: tensor {entry.stored_name} needs bytes {entry.offset} to {end}, "
            f"the file has {file_bytes}",
            hint="fetch or copy the file again",
        )
