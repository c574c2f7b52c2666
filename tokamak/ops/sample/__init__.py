"""How likely each token of a vocabulary row is, for drawing one, and which is the likeliest."""

from tokamak.ops.sample.reference import BLOCK_TOKENS, argmax_rows, token_weights

__all__ = ["BLOCK_TOKENS", "argmax_rows", "token_weights"]
