"""Rows of numbers to records of a cache, in plain PyTorch. No number is read to the host."""

from __future__ import annotations

from torch import Tensor

from tokamak.ops.compress.reference import write_rows
from tokamak.ops.records.formats import KVFormat
from tokamak.ops.registry import op


@op
def write_records(
    cache: Tensor, rows: Tensor, slots: Tensor, positions: Tensor, ratio: int, form: KVFormat
) -> None:
    """Write rows to a cache as records of a format, as `write_rows` does: reading gives the rows after its round trip.

    Rows come as they were computed: one that has been through the format already may lose digits in a second trip.

    cache: uint8 [blocks, 1, block_rows, form.bytes_per_row(width)], changed. rows: [tokens, width] of floats.
    slots: [tokens] int64; positions: [tokens] int32; ratio: of tokens in a group, whose last is written.
    """
    write_rows.reference(cache, form.pack(rows), slots, positions, ratio)
