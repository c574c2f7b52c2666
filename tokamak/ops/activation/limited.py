"""The gated activation with limits in plain PyTorch (DeepSeek V4)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from tokamak.ops.registry import op


@op
def silu_mul_limited(gate_up: Tensor, limit: float) -> Tensor:
    """Multiply silu(gate) with up, gate no larger than `limit` and up from -limit to limit.

    gate_up: [rows, 2 * width], gate first; returns [rows, width] in the same dtype, computed in float32.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gated = functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return gated.to(gate_up.dtype)
