"""How do weights get from a mapped file to a device? Piece by piece through pinned memory.

Two buffers take turns: while the device copies one, the file is read into the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.core.weight import DenseWeight, GroupedWeight, PackedWeight, ScaledWeight, Weight

BUFFER_BYTES = 64 * 1024**2


class Uploader:
    """Makes copies of weights on a device."""

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        on_cuda = device.type == "cuda"
        self._device = device
        self._buffers = [
            torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(2)
        ]
        self._copied = [torch.cuda.Event() for _ in range(2)] if on_cuda else None
        self._turn = 0

    def weight(self, weight: Weight) -> Weight:
        """The same weight on the device, in the number format it has."""
        if isinstance(weight, DenseWeight):
            return DenseWeight(self.tensor(weight.values))
        if isinstance(weight, ScaledWeight):
            return ScaledWeight(self.tensor(weight.codes), self.tensor(weight.scales), weight.block)
        if isinstance(weight, PackedWeight):
            return PackedWeight(self.tensor(weight.codes), self.tensor(weight.scales))
        return GroupedWeight(
            codes=self.tensor(weight.codes),
            scales=self.tensor(weight.scales),
            minimums=self.tensor(weight.minimums),
            bits=weight.bits,
        )

    def tensor(self, host: Tensor) -> Tensor:
        """A contiguous copy on the device. The host's memory has been read when this returns."""
        host = host.contiguous()
        out = torch.empty_like(host, device=self._device)
        size = self._buffers[0].numel()
        pieces = host.view(-1).view(torch.uint8).split(size)
        places = out.view(-1).view(torch.uint8).split(size)
        for piece, place in zip(pieces, places, strict=True):
            self._copy(piece, place)
        return out

    def _copy(self, piece: Tensor, place: Tensor) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        buffer = self._buffers[turn][: piece.numel()]
        if self._copied is not None:
            self._copied[turn].synchronize()
        buffer.copy_(piece)
        place.copy_(buffer, non_blocking=True)
        if self._copied is not None:
            self._copied[turn].record()
