"""Cached rows as records: the bytes of a narrow number format, codes and scales together."""

from tokamak.ops.records.formats import (
    BF16,
    FP8,
    FP8_PLAIN_TAIL,
    FP8_WIDE,
    KV_FORMATS,
    MXFP4,
    NVFP4,
    KVFormat,
    numbers_of,
)
from tokamak.ops.records.reference import write_records

__all__ = [
    "BF16",
    "FP8",
    "FP8_PLAIN_TAIL",
    "FP8_WIDE",
    "KV_FORMATS",
    "MXFP4",
    "NVFP4",
    "KVFormat",
    "numbers_of",
    "write_records",
]
