"""What a step's rows are, derived on the device from a few numbers per request."""

from tokamak.ops.step_prep.derived import fill_indptrs, fill_unit_tiles
from tokamak.ops.step_prep.reference import fill_step

__all__ = ["fill_indptrs", "fill_step", "fill_unit_tiles"]
