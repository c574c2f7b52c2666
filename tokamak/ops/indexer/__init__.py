"""Which compressed entries does a query attend to? Scores of index keys, and the entries with the highest."""

from tokamak.ops.indexer.reference import select_entries

__all__ = ["select_entries"]
