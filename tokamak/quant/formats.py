"""How many bytes does a cached row take in each number format? The formats, by the names that models use.

They are those of `tokamak/ops/records`, whose ops write and read them.
"""

from tokamak.ops.records import (
    BF16,
    FP8,
    FP8_PLAIN_TAIL,
    FP8_WIDE,
    KV_FORMATS,
    MXFP4,
    NVFP4,
    KVFormat,
)

__all__ = [
    "BF16",
    "FP8",
    "FP8_PLAIN_TAIL",
    "FP8_WIDE",
    "KV_FORMATS",
    "MXFP4",
    "NVFP4",
    "KVFormat",
]
