"""Token ids to their vectors in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tokamak.ops.registry import op


@op
def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """Copy the rows of a table that token ids name.

    token_ids: [tokens] int32, each in [0, vocab). table: [vocab, width]; returns a new [tokens, width] tensor
    in the dtype of the table.
    """
    return functional.embedding(token_ids, table)
