"""Which experts a token goes to, and with what weights."""

from tokamak.ops.moe_route.reference import moe_route
from tokamak.ops.moe_route.rooted import moe_route_rooted, moe_weigh_rooted

__all__ = ["moe_route", "moe_route_rooted", "moe_weigh_rooted"]
