"""What a step's token rows are, derived on the device from a few numbers per request."""

from tokamak.ops.step_prep.reference import fill_rows, fill_slots

__all__ = ["fill_rows", "fill_slots"]
