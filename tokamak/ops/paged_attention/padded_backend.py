"""Registers the padded form behind every kernel of ours: it runs wherever PyTorch does.

A module of its own, because kernels fall back on that form too and would register it before themselves.
"""

from __future__ import annotations

from tokamak.device.facts import DeviceFacts
from tokamak.ops.paged_attention.padded import padded_paged_attention
from tokamak.ops.paged_attention.reference import paged_attention
from tokamak.ops.registry import takes_numbers


def _everywhere(facts: DeviceFacts) -> bool:
    del facts
    return True


paged_attention.backend("padded", fits=_everywhere, takes=takes_numbers)(padded_paged_attention)
