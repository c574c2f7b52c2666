"""What a GGUF file holds: its metadata and its tensor table. No tensor is read.

The file is mapped, not read. Arrays of the metadata, such as a vocabulary, are passed over and read when
asked for, so opening a file takes milliseconds. Every count and byte range is checked first.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tokamak.checkpoint.entry import Format
from tokamak.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

MAGIC = b"GGUF"

VERSIONS = (2, 3)

MAX_DIMENSIONS = 4

FORMATS: dict[int, Format] = {
    number: Format(name, block_numbers, block_bytes)
    for number, name, block_numbers, block_bytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
    )
}
"""By the number a file writes: the formats of tensors."""

STRING, ARRAY = 8, 9

SCALARS: dict[int, struct.Struct] = {
    number: struct.Struct(f"<{code}")
    for number, code in (
        (0, "B"),
        (1, "b"),
        (2, "H"),
        (3, "h"),
        (4, "I"),
        (5, "i"),
        (6, "f"),
        (7, "?"),
        (10, "Q"),
        (11, "q"),
        (12, "d"),
    )
}
"""By the number a file writes: the scalar types of metadata."""

_U32 = SCALARS[4]
_U64 = SCALARS[10]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in the rest of this program; the file writes columns first."""
    format: Format
    offset: int
    """Where its bytes begin in the file."""


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of the metadata, read when asked for."""

    buffer: mmap.mmap
    item_type: int
    start: int
    count: int

    def strings(self) -> list[str]:
        """The items of an array of strings; bytes that are no UTF-8 become U+FFFD."""
        assert self.item_type == STRING, "not an array of strings"
        unpack, buffer, at = _U64.unpack_from, self.buffer, self.start
        items: list[str] = []
        for _ in range(self.count):
            end = at + 8 + unpack(buffer, at)[0]
            items.append(buffer[at + 8 : end].decode("utf-8", errors="replace"))
            at = end
        return items

    def numbers(self) -> np.ndarray[Any, Any]:
        """The items of an array of numbers: [count], in the file's type."""
        dtype = np.dtype(SCALARS[self.item_type].format)
        return np.frombuffer(self.buffer, dtype, self.count, self.start).copy()


class GgufFile:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its metadata and tensor table.

        Raises:
            ModelNotFoundError: there is no such file.
            CheckpointError: it is no GGUF file, is truncated or contradicts itself.
            UnsupportedModelError: its version or the format of a tensor is not known.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self.file_bytes = file.seek(0, 2)
                if self.file_bytes < 24:
                    raise CheckpointError(
                        f"{path} has {self.file_bytes} bytes, less than the header of a GGUF file",
                        hint="fetch or copy the file again",
                    )
                self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise ModelNotFoundError(f"there is no file {path}") from error
        self._at = 0
        try:
            tensor_count, value_count = self._header()
            self.metadata: Mapping[str, Any] = dict(self._metadata(value_count))
            self.tensors = {tensor.name: tensor for tensor in self._tensors(tensor_count)}
        except struct.error:
            self._truncated("its metadata")

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A scalar of the metadata, which must have the given type; `default` where it is missing.

        Raises:
            CheckpointError: the value has another type.
        """
        value = self.metadata.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            expected = kind.__name__ if isinstance(kind, type) else "number"
            raise CheckpointError(f"{key} of {self.path} is {value!r}; expected {expected}")
        return value

    def strings(self, key: str) -> list[str]:
        """An array of strings of the metadata.

        Raises:
            CheckpointError: it is missing or holds something else.
        """
        value = self.metadata.get(key)
        if not isinstance(value, GgufArray) or value.item_type != STRING:
            raise CheckpointError(f"{self.path} has no list of strings {key}")
        return value.strings()

    def numbers(self, key: str) -> list[Any]:
        """An array of numbers of the metadata.

        Raises:
            CheckpointError: it is missing or holds something else.
        """
        value = self.metadata.get(key)
        if not isinstance(value, GgufArray) or value.item_type == STRING:
            raise CheckpointError(f"{self.path} has no list of numbers {key}")
        return value.numbers().tolist()

    def tensor_bytes(self, tensor: GgufTensor) -> bytes:
        """A copy of a small tensor's bytes."""
        return self._buffer[tensor.offset : tensor.offset + tensor.format.bytes_of(tensor.shape)]

    def _header(self) -> tuple[int, int]:
        """Check magic and version; the counts of tensors and of metadata values."""
        if self._buffer[:4] != MAGIC:
            raise CheckpointError(
                f"{self.path} begins with {self._buffer[:4]!r}; a GGUF file begins with {MAGIC!r}"
            )
        self._at = 4
        version = self._scalar(_U32)
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "a big-endian file" if swapped else f"version {version}"
            known = " and ".join(str(v) for v in VERSIONS)
            raise UnsupportedModelError(
                f"{self.path} is GGUF of {what}; versions {known}, little-endian, can be read"
            )
        return self._scalar(_U64), self._scalar(_U64)

    def _metadata(self, count: int) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for _ in range(count):
            key = self._string()
            if key in seen:
                raise CheckpointError(f"{self.path} has two values of {key}")
            seen.add(key)
            yield key, self._value(key, self._scalar(_U32))

    def _value(self, key: str, value_type: int) -> Any:
        if value_type == STRING:
            return self._string()
        if value_type == ARRAY:
            return self._array(key)
        if value_type not in SCALARS:
            raise CheckpointError(f"{key} of {self.path} has the unknown type {value_type}")
        return self._scalar(SCALARS[value_type])

    def _array(self, key: str) -> GgufArray:
        """Pass over an array, checking only that it lies inside the file."""
        item_type, count = self._scalar(_U32), self._scalar(_U64)
        array = GgufArray(self._buffer, item_type, self._at, count)
        if item_type == STRING:
            unpack, buffer, at = _U64.unpack_from, self._buffer, self._at
            for _ in range(count):
                at += 8 + unpack(buffer, at)[0]
            self._at = at
        elif item_type in SCALARS:
            self._at += count * SCALARS[item_type].size
        else:
            raise CheckpointError(f"{key} of {self.path} is an array of unknown type {item_type}")
        if self._at > self.file_bytes:
            self._truncated(f"the array {key}")
        return array

    def _tensors(self, count: int) -> Iterator[GgufTensor]:
        rows = [self._tensor_row() for _ in range(count)]
        alignment = self.get("general.alignment", int, 32)
        if alignment <= 0 or alignment % 8:
            raise CheckpointError(
                f"general.alignment of {self.path} is {alignment}; expected a multiple of 8"
            )
        data_start = -(-self._at // alignment) * alignment
        seen: set[str] = set()
        for name, shape, form, offset in rows:
            if name in seen:
                raise CheckpointError(f"{self.path} has two tensors {name}")
            seen.add(name)
            if offset % alignment:
                raise CheckpointError(
                    f"tensor {name} of {self.path} begins at {offset}, not at a multiple of {alignment}"
                )
            start, nbytes = data_start + offset, form.bytes_of(shape)
            if start + nbytes > self.file_bytes:
                self._truncated(f"tensor {name}: it needs bytes {start} to {start + nbytes}")
            yield GgufTensor(name, shape, form, start)

    def _tensor_row(self) -> tuple[str, tuple[int, ...], Format, int]:
        name, dimensions = self._string(), self._scalar(_U32)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise CheckpointError(
                f"tensor {name} of {self.path} has {dimensions} dimensions; expected 1 to "
                f"{MAX_DIMENSIONS}"
            )
        shape = tuple(self._scalar(_U64) for _ in range(dimensions))[::-1]
        number, offset = self._scalar(_U32), self._scalar(_U64)
        if number not in FORMATS:
            raise UnsupportedModelError(
                f"tensor {name} of {self.path} has the number format {number}, which is not known",
                hint=f"known: {', '.join(form.name for form in FORMATS.values())}",
            )
        form = FORMATS[number]
        if prod(shape) == 0 or shape[-1] % form.block_numbers:
            raise CheckpointError(
                f"tensor {name} of {self.path} has shape {list(shape)}; expected rows of whole "
                f"{form.name} blocks of {form.block_numbers}"
            )
        return name, shape, form, offset

    def _scalar(self, kind: struct.Struct) -> Any:
        (value,) = kind.unpack_from(self._buffer, self._at)
        self._at += kind.size
        return value

    def _string(self) -> str:
        length = self._scalar(_U64)
        end = self._at + length
        if end > self.file_bytes:
            self._truncated("its metadata")
        text = self._buffer[self._at : end].decode("utf-8", errors="replace")
        self._at = end
        return text

    def _truncated(self, where: str) -> NoReturn:
        raise CheckpointError(
            f"{self.path} is truncated: it has {self.file_bytes} bytes and ends inside {where}",
            hint="fetch or copy the file again",
        ) from None
