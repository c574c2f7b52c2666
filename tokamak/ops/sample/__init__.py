"""How likely each token of a vocabulary row is, for drawing one."""

from tokamak.ops.sample.reference import BLOCK_TOKENS, token_weights

__all__ = ["BLOCK_TOKENS", "token_weights"]
