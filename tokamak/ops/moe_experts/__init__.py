"""Rows through the experts chosen for them."""

from tokamak.ops.moe_experts.limited import moe_experts_limited
from tokamak.ops.moe_experts.limited_stored import packed_experts_limited, scaled_experts_limited
from tokamak.ops.moe_experts.reference import moe_experts, scaled_experts

__all__ = [
    "moe_experts",
    "moe_experts_limited",
    "packed_experts_limited",
    "scaled_experts",
    "scaled_experts_limited",
]
