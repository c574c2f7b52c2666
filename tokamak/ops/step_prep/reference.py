"""Token ids, positions, cache slots and block tables of a step in plain PyTorch, without a host read.

Ids come from the history of each slot on the device, so a token that was sampled a moment ago needs no
way through the host. `host.py` says the same in plain loops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokamak.ops.registry import op


@op
def fill_step(
    slots: Tensor,
    computed_before: Tensor,
    query_starts: Tensor,
    grants: Tensor,
    history: Tensor,
    tables: Tensor,
    scheduled_requests: int,
    scheduled_tokens: int,
    block_tokens: int,
    columns: int,
    token_ids: Tensor,
    positions: Tensor,
    write_slots: Tensor,
    block_tables: Tensor,
) -> None:
    """Apply a step's block grants, then write what its token rows and request rows are.

    Padding token rows get id 0, position 0 and write slot -1; padding request rows get null blocks.

    slots, computed_before: [running_requests] int32. query_starts: [running_requests + 1] int32.
    grants: [4, granted] int32, the group, slot, entry and block id of each granted block.
    history: [slots, positions] int32. columns: how many entries of a block table are written.
    Changed: tables [groups, slots, blocks] int32.
    Out: token_ids, positions [running_tokens] int32. write_slots [groups, running_tokens] int64, which is
    block * block_tokens + offset. block_tables [groups, running_requests, blocks] int32.
    """
    if grants.shape[1]:
        tables[grants[0], grants[1], grants[2]] = grants[3]
    real, requests = scheduled_tokens, scheduled_requests
    block_tables[:, :requests, :columns] = tables[:, :, :columns].index_select(1, slots[:requests])
    if requests < len(slots):
        block_tables[:, requests:, :columns] = 0
    starts = query_starts[: requests + 1]
    lens = starts[1:] - starts[:-1]
    shift = computed_before[:requests] - starts[:-1]
    at = torch.arange(real, dtype=torch.int32, device=slots.device)
    real_positions = at + shift.repeat_interleave(lens, output_size=real)
    real_slots = slots[:requests].repeat_interleave(lens, output_size=real)
    positions[:real] = real_positions
    at_history = real_slots.long() * history.shape[1] + real_positions
    token_ids[:real] = history.flatten().index_select(0, at_history)
    at_table = real_slots * tables.shape[2] + real_positions // block_tokens
    blocks = tables.flatten(1).index_select(1, at_table).long()
    write_slots[:, :real] = blocks * block_tokens + real_positions % block_tokens
    if real < len(token_ids):
        token_ids[real:] = 0
        positions[real:] = 0
        write_slots[:, real:] = -1
