"""Rows through the experts chosen for them."""

from tokamak.ops.moe_experts.reference import moe_experts, scaled_experts

__all__ = ["moe_experts", "scaled_experts"]
