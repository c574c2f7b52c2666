"""The fill of a step in vector operations of numpy: on a few rows they begin much sooner than PyTorch's."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tokamak.ops.step_prep.reference import fill_step


@fill_step.backend("numpy", fits=lambda facts: facts.vendor == "cpu")
def fill_step_numpy(
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
    """Fill tensors in host memory; what lies elsewhere is the reference's."""
    if slots.device.type != "cpu":
        fill_step.reference(
            slots, computed_before, query_starts, grants, history, tables, scheduled_requests,
            scheduled_tokens, block_tokens, columns, token_ids, positions, write_slots, block_tables,
        )  # fmt: skip
        return
    real, requests = scheduled_tokens, scheduled_requests
    held, tokens, known = tables.numpy(), token_ids.numpy(), history.numpy()
    if grants.shape[1]:
        groups, of, entries, block_ids = grants.numpy()
        held[groups, of, entries] = block_ids
    real_slots, out = slots.numpy()[:requests], block_tables.numpy()
    out[:, :requests, :columns] = held[:, real_slots, :columns]
    out[:, requests:, :columns] = 0
    real_positions = computed_before.numpy()[:requests]
    if real != requests:  # a row has at least one token
        starts = query_starts.numpy()[: requests + 1]
        lens = np.diff(starts)
        shift = np.repeat(real_positions - starts[:-1], lens)
        real_positions = np.arange(real, dtype=np.int32) + shift
        real_slots = np.repeat(real_slots, lens)
    at, place = positions.numpy(), write_slots.numpy()
    at[:real] = real_positions
    tokens[:real] = known[real_slots, real_positions]
    blocks, offsets = np.divmod(real_positions, np.int32(block_tokens))
    place[:, :real] = held[:, real_slots, blocks]
    place[:, :real] *= block_tokens
    place[:, :real] += offsets
    if real < len(tokens):
        at[real:] = 0
        tokens[real:] = 0
        place[:, real:] = -1
