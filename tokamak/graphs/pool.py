"""Where do tensors of recorded CPU segments live? In chunks of bytes that a back end owns.

Memory is given back when a recording's tensor dies and then holds the next one, in the same segment or
another bucket's: as in the private pool of a CUDA graph. Addresses stay valid as long as the pool lives.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
CHUNK_BYTES = 1 << 20
FREE_BYTE = 0xFF
"""Bytes of poisoned memory: NaN as float32 and as bfloat16, -1 as an integer."""


class _Chunk:
    """One piece of memory and its free spans, sorted."""

    def __init__(self, size: int) -> None:
        backing = np.empty(size + ALIGNMENT, dtype=np.uint8)
        first = -backing.ctypes.data % ALIGNMENT
        self.memory = backing[first : first + size]
        self.base = torch.from_numpy(self.memory)
        self.start = self.base.data_ptr()
        self.size = size
        self.spans: list[tuple[int, int]] = [(0, size)]

    def take(self, size: int) -> int | None:
        """The first free place of `size` bytes, or None."""
        for at, (begin, end) in enumerate(self.spans):
            if end - begin >= size:
                rest = [(begin + size, end)] if end - begin > size else []
                self.spans[at : at + 1] = rest
                return begin
        return None

    def give(self, begin: int, size: int) -> None:
        """Free a place; neighbours become one span."""
        merged: list[tuple[int, int]] = []
        for span in sorted([*self.spans, (begin, begin + size)]):
            if merged and merged[-1][1] == span[0]:
                merged[-1] = (merged[-1][0], span[1])
            else:
                merged.append(span)
        self.spans = merged


class BytePool:
    """Memory for tensors, first fit."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunks: list[_Chunk] = []
        # Tensors may die in any thread, and while the pool is at work: they queue here until the next call.
        self._returned: deque[tuple[_Chunk, int, int]] = deque()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all chunks, in use or free."""
        return sum(chunk.size for chunk in self._chunks)

    def tensor(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with nothing in it; its memory is free again when it and all views of it are gone."""
        numbers = 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))
        size = -(-numbers * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        chunk, begin = self._take(size)
        piece = chunk.memory[begin : begin + size]
        weakref.finalize(piece, self._returned.append, (chunk, begin, size)).atexit = False
        return torch.from_numpy(piece).view(dtype).as_strided(shape, stride)

    def alias(self, tensor: Tensor) -> Tensor | None:
        """The same numbers without a hold on the memory's use; None for a tensor of other memory."""
        if not torch._C._has_storage(tensor):
            return None
        address = tensor.data_ptr()
        for chunk in self._chunks:
            offset = address - chunk.start
            if 0 <= offset < chunk.size:
                base = chunk.base.view(tensor.dtype)
                at = offset // tensor.dtype.itemsize
                return base.as_strided(tensor.shape, tensor.stride(), at)
        return None

    def poison(self) -> None:
        """Fill free memory with FREE_BYTE."""
        self._collect()
        for chunk in self._chunks:
            for begin, end in chunk.spans:
                chunk.memory[begin:end] = FREE_BYTE

    def _take(self, size: int) -> tuple[_Chunk, int]:
        self._collect()
        for chunk in self._chunks:
            begin = chunk.take(size)
            if begin is not None:
                return chunk, begin
        chunk = _Chunk(max(size, self._chunk_bytes))
        self._chunks.append(chunk)
        begin = chunk.take(size)
        assert begin is not None
        return chunk, begin

    def _collect(self) -> None:
        while self._returned:
            chunk, begin, size = self._returned.popleft()
            chunk.give(begin, size)
