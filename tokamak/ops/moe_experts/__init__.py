"""Rows through the experts chosen for them."""

from tokamak.ops.moe_experts.reference import moe_experts

__all__ = ["moe_experts"]
