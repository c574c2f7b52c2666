"""How likely each token of a vocabulary row is, which is the likeliest, and which one is drawn."""

from tokamak.ops.sample.reference import (
    BLOCK_TOKENS,
    TABLE_COLUMNS,
    argmax_rows,
    draw_by_id,
    draw_rows,
    first_above,
    token_weights,
)
from tokamak.ops.sample.uniform import uniforms_of

__all__ = [
    "BLOCK_TOKENS",
    "TABLE_COLUMNS",
    "argmax_rows",
    "draw_by_id",
    "draw_rows",
    "first_above",
    "token_weights",
    "uniforms_of",
]
