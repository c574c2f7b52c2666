"""Which experts a token goes to, and with what weights."""

from tokamak.ops.moe_route.reference import moe_route

__all__ = ["moe_route"]
