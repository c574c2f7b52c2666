"""The n-gram memory: rows of a table found by hashes of the newest tokens, and a gate that lets them in."""

from tokamak.ops.engram.reference import engram_gate, engram_rows, engram_values

__all__ = ["engram_gate", "engram_rows", "engram_values"]
