"""How do numbers of the host reach the device without a wait? Through pinned memory, in the order of what is launched.

A copy from ordinary memory makes the host wait for all that was launched before it. Pinned memory comes from
PyTorch's cache, which does not give it out again before the copy has read it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def staged(values: np.ndarray, device: torch.device) -> Tensor:
    """The numbers as a tensor on a device; on a CPU it is a view of the array."""
    host = torch.from_numpy(values)
    if device.type == "cpu":
        return host
    if not host.numel():
        return torch.empty_like(host, device=device)
    return host.pin_memory().to(device, non_blocking=True)
