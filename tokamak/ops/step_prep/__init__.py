"""What a step's rows are, derived on the device from a few numbers per request."""

# The op comes with its numpy backend: that library is always there.
from tokamak.ops.step_prep.cpu import fill_step
from tokamak.ops.step_prep.derived import fill_indptrs, fill_unit_tiles

__all__ = ["fill_indptrs", "fill_step", "fill_unit_tiles"]
