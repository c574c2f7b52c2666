"""Vectors of token ids."""

from tokamak.ops.embedding.reference import embed

__all__ = ["embed"]
