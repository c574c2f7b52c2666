"""Matrix products with weights that stay put: packed once, applied every step."""

from tokamak.ops.linear.device import DeviceLinear
from tokamak.ops.linear.forms import PackedLinear
from tokamak.ops.linear.pack import pack_linear, pack_with_reason

__all__ = ["DeviceLinear", "PackedLinear", "pack_linear", "pack_with_reason"]
