"""What do both attention kernels in LLVM read? Their arguments, the cached rows of a request, and sinks."""

from __future__ import annotations

from dataclasses import dataclass

from tokamak.ops.jit.language import Kernel
from tokamak.ops.jit.values import Num, Pointer

(
    Q, K_CACHE, K_BLOCK, K_HEAD, K_ROW, V_CACHE, V_BLOCK, V_HEAD, V_ROW, TABLE, TABLE_STRIDE, LENGTHS, STARTS,
    OUT, SCALE, WINDOW, KV_HEADS, BLOCK_TOKENS, FIRST, REQUESTS, TILES, SCORES, SCORES_STRIDE, SINKS,
) = range(24)  # fmt: skip
PARAMETERS = 24
"""Arguments of both kernels, in their order."""
NEVER = -1e30
"""A score no key reaches; finite, so that differences of two are not NaN."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernels are compiled for."""

    head_dim: int
    groups: int
    """Query heads per key head."""
    kind: str
    """Format of queries, cache and output."""
    sinks: bool
    """Whether heads have a score beside those of their keys."""

    @property
    def name(self) -> str:
        """Such as `d64_g3_f32`."""
        return f"d{self.head_dim}_g{self.groups}_{self.kind}{'_sinks' if self.sinks else ''}"


class Rows:
    """The cached keys or values of one request and one key head, while a kernel is written."""

    def __init__(self, kernel: Kernel, kind: str, cache: int, request: Num, head: Num) -> None:
        self._kernel = kernel
        self.head = kernel.integer(cache + 2)
        self._base = kernel.pointer(cache, kind)[head * self.head]
        self._block = kernel.integer(cache + 1)
        self.row = kernel.integer(cache + 3)
        self._table = kernel.pointer(TABLE, "i32")[request * kernel.integer(TABLE_STRIDE)]

    def block(self, index: Num) -> Pointer:
        """Where the rows of a request's block begin."""
        return self._base[self._table[index].load().to_int() * self._block]


def sink_of(kernel: Kernel, head: Num) -> Num:
    """The score beside those of a query head's keys."""
    return kernel.pointer(SINKS, "f32")[head].load().most(kernel.float(NEVER))
