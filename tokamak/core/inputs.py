"""The tensors of one step, as the model's layers receive them.

Token rows are laid out request by request, prefill rows first, padding last. One `StepInputs` exists per
recorded shape and is refilled in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Rows:
    """Where one cache group's rows lie for this step."""

    block_table: (
        Tensor  # [requests, blocks]  int32, entries past a request's blocks are 0 (null block)
    )
    lengths: (
        Tensor  # [requests]           int32, tokens visible to the last query, this step's included
    )
    write_slots: Tensor  # [tokens]            int64, block * block_tokens + offset, -1 for padding
    block_tokens: int


@dataclass(slots=True)
class StepInputs:
    """What a model's forward reads."""

    token_ids: Tensor  # [tokens]          int32
    positions: Tensor  # [tokens]          int32, 0 for padding
    query_starts: Tensor  # [requests + 1]    int32, first token row of each request
    logit_rows: Tensor  # [sampled]         int64, token rows whose logits are wanted
    rows: Mapping[str, Rows]  # by cache group
    prefill_requests: int  # requests [0, prefill_requests) are prefill rows
    prefill_tokens: int  # token rows they have
