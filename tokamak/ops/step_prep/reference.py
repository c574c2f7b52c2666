"""Token ids, positions and cache slots of a step in plain PyTorch.

Ids come from the history of each slot on the device, so a token that was sampled a moment ago needs no
way through the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.registry import op


@op
def fill_rows(
    slots: Tensor,
    computed_before: Tensor,
    query_starts: Tensor,
    history: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    token_slots: Tensor,
) -> None:
    """Write the id, position and slot of every token row; padding rows get 0, 0 and 0.

    slots, computed_before: [requests] int32. query_starts: [requests + 1] int32.
    history: [slots, positions] int32. Out: token_ids, positions, token_slots: [tokens] int32.
    """
    lens = query_starts[1:] - query_starts[:-1]
    tokens = int(query_starts[-1])
    shift = computed_before - query_starts[:-1]
    at = torch.arange(tokens, dtype=torch.int32, device=slots.device)
    real_positions = at + shift.repeat_interleave(lens)
    real_slots = slots.repeat_interleave(lens)
    for out, real in ((positions, real_positions), (token_slots, real_slots)):
        out[:tokens] = real
        out[tokens:] = 0
    token_ids[:tokens] = history[real_slots, real_positions]
    token_ids[tokens:] = 0


@op
def fill_slots(
    token_slots: Tensor,
    positions: Tensor,
    table: Tensor,
    scheduled_tokens: int,
    block_tokens: int,
    write_slots: Tensor,
) -> None:
    """Write where each token row's cache row goes: block * block_tokens + offset, -1 for padding.

    token_slots, positions: [tokens] int32. table: [slots, blocks] int32. Out: write_slots [tokens] int64.
    """
    real = positions[:scheduled_tokens]
    blocks = table[token_slots[:scheduled_tokens], real // block_tokens].long()
    write_slots[:scheduled_tokens] = blocks * block_tokens + real % block_tokens
    write_slots[scheduled_tokens:] = -1
