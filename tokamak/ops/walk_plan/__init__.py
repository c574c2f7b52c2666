"""Which index keys does each persistent program of the scorer walk through? Slices that end together."""

from tokamak.ops.walk_plan.reference import fill_walk_plan

__all__ = ["fill_walk_plan"]
