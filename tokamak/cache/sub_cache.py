"""What a model keeps per request between steps, as a declaration.

A model states its sub-caches; `groups.py` groups those that cover tokens alike, `layout.py` packs the
groups into blocks, `arena.py` makes the one allocation and the views.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SubCache:
    """One kind of state: a row per token (or per `stride_tokens` tokens) in each of some layers.

    A row is `heads` vectors of `width` numbers in `dtype` (`float32`, `bfloat16` or `fp8`), or `width` bytes of records
    whose format the model knows (`uint8`; see `tokamak/ops/records/formats.py`).
    """

    name: str
    layers: tuple[int, ...]
    heads: int
    width: int
    dtype: str
    stride_tokens: int = 1
    """Tokens that share a row."""
    keep_tokens: int = 0
    """How many newest tokens must stay readable; 0 keeps all (full attention)."""
    late_tokens: int = 0
    """Of a prompt, rows of the newest so many tokens alone are written, enough for all that is read; 0 writes all.

    More than `keep_tokens`: it is what layers behind one another need to get the newest rows right. `keep_tokens`
    itself where windows begin at the first such row: then rows of a longer prompt are its own, and no other's.
    """
