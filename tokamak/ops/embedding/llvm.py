"""Token ids to vectors in LLVM: a token a work item."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tokamak.ops.embedding.reference import embed
from tokamak.ops.jit.available import fits
from tokamak.ops.jit.compiler import KernelSource, Library, threads_for
from tokamak.ops.jit.language import Kernel
from tokamak.ops.jit.torch_kinds import KINDS, fresh

TOKEN_IDS, TABLE, OUT, TOKENS, WIDTH = range(5)
PARAMETERS = 5
GRAIN_NUMBERS = 16384


def _kernel(kind: str) -> Callable[[Kernel], None]:
    def write(kernel: Kernel) -> None:
        width = kernel.integer(WIDTH)
        with kernel.items(kernel.integer(TOKENS)) as token:
            token_id = kernel.pointer(TOKEN_IDS, "i32")[token].load().to_int()
            source = kernel.pointer(TABLE, kind)[token_id * width]
            target = kernel.pointer(OUT, kind)[token * width]
            kernel.sweep(width, lambda at, lanes: target[at].store(source[at].load(lanes)))

    return write


@lru_cache
def kernel_for(dtype: torch.dtype) -> Callable[..., None]:
    """The compiled call for a dtype."""
    name = f"embed_{KINDS[dtype]}"
    source = KernelSource(name, PARAMETERS, _kernel(KINDS[dtype]))
    return Library(name, [Path(__file__)], [source]).function(name)


@embed.backend("llvm", fits=fits)
def llvm_embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """Copy the rows of a table that token ids name."""
    if table.dtype not in KINDS or token_ids.dtype != torch.int32 or not table.is_contiguous():
        return embed.reference(token_ids, table)
    token_ids = token_ids.contiguous()
    tokens, width = token_ids.shape[0], table.shape[1]
    out = fresh((tokens, width), table.dtype)
    kernel_for(table.dtype)(
        threads_for(tokens * width, GRAIN_NUMBERS),
        token_ids.data_ptr(), table.data_ptr(), out.data_ptr(), tokens, width,
    )  # fmt: skip
    return out
