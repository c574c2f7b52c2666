"""Models whose late layers make nothing that all tokens read: in a prefill they run for the newest rows of a prompt.

Early layers run for all rows, and what they leave of each goes to the late ones as a row of bytes.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tokamak.core.inputs import StepInputs
from tokamak.graphs.region import Manifest

ROW_ALIGNMENT = 4
"""Bytes of which a carried row is a multiple, so that float32 numbers can lie in it."""


class Stages(Protocol):
    """A forward in two parts. Both after one another, over the same rows, are the model's forward."""

    @property
    def late_tokens(self) -> int:
        """How many newest tokens of a prompt late layers run for: no number read later changes, but where `bounded`."""
        ...

    @property
    def bounded(self) -> bool:
        """Whether these are a window alone, and windows of late layers begin at the first: an approximation."""
        ...

    @property
    def carried_bytes(self) -> int:
        """How long a row is that early layers leave."""
        ...

    def early(self, step: StepInputs) -> Tensor:
        """Run early layers and all that writes state every token reads: uint8 [tokens, carried_bytes]."""
        ...

    def late(self, carried: Tensor, step: StepInputs) -> Tensor:
        """Run late layers over some carried rows and the inputs of these: hidden states [rows, width]."""
        ...

    def early_regions(self) -> Manifest:
        """The eager regions that `early` meets."""
        ...

    def late_regions(self) -> Manifest:
        """The eager regions that `late` meets."""
        ...


def late_tokens(*, window_tokens: int, layers: int) -> int:
    """Newest tokens that some last layers, each reading a window of rows, must run for to change nothing.

    The last token's row of the last layer reads `window_tokens` rows, itself among them, and each of these
    `window_tokens - 1` more in the layer before. The rows of windows that later tokens read are among them.
    """
    return 1 + (window_tokens - 1) * layers


def pack_rows(read: Tensor, streams: Tensor) -> Tensor:
    """One row of bytes a token, of float32 [tokens, streams] and [tokens, streams, width]."""
    parts = [read.contiguous().view(torch.uint8), streams.flatten(1).contiguous().view(torch.uint8)]
    return torch.cat(parts, dim=1)


def unpack_rows(carried: Tensor, *, streams: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `pack_rows` packed, `read` and the streams of that dtype."""
    divide = ROW_ALIGNMENT * streams
    read = carried[:, :divide].contiguous().view(torch.float32)
    rest = carried[:, divide:].contiguous().view(dtype)
    return read, rest.view(carried.shape[0], streams, -1)


def row_bytes(*, streams: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of a packed row."""
    return ROW_ALIGNMENT * streams + dtype.itemsize * streams * width
