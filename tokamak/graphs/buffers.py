"""Which buffers outlive recordings? Made by name before recording begins, never while it runs.

A buffer made inside a capture would lie in the graph's pool, and be overwritten by the next bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tokamak.errors import GraphError, LateBuffer


class StaticBuffers:
    """Buffers at fixed addresses, by name."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._sealed = False

    def make(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A new buffer of zeros.

        Raises:
            LateBuffer: a recording is being made.
            GraphError: the name is taken.
        """
        if self._sealed:
            raise LateBuffer(
                f"buffer {name!r} of shape {list(shape)} was asked for while a graph is recorded",
                hint="make it at its largest size before recording begins",
            )
        if name in self._buffers:
            raise GraphError(
                f"there is a buffer {name!r} already, of shape {list(self._buffers[name].shape)}",
                hint="give this one another name",
            )
        self._buffers[name] = torch.zeros(shape, dtype=dtype, device=device)
        return self._buffers[name]

    @property
    def total_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @contextmanager
    def sealed(self) -> Iterator[None]:
        """No buffer can be made inside."""
        before, self._sealed = self._sealed, True
        try:
            yield
        finally:
            self._sealed = before
