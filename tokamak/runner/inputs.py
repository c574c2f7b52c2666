"""Fixed device buffers of a step's inputs: staged on the host, published in one copy, filled on the device.

In: a StepPlan and its StepShape. Out: StepInputs whose tensors keep their addresses from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokamak.cache.groups import CacheGroup
from tokamak.cache.tables import BlockTables
from tokamak.core.inputs import Rows, StepInputs
from tokamak.core.plan import Admission, StepPlan, StepShape
from tokamak.layers.build import Build
from tokamak.ops.step_prep import fill_rows, fill_slots


@dataclass(frozen=True, slots=True)
class _Member:
    """A named stretch of the packed buffer."""

    start: int
    stop: int


class InputArena:
    """Packed int32 members, the token history of every slot, and the block tables."""

    def __init__(
        self,
        build: Build,
        groups: Sequence[CacheGroup],
        *,
        max_requests: int,
        max_tokens: int,
        block_tokens: int,
    ) -> None:
        device, slots = build.device, max_requests + 1  # slot 0 is the null slot of dummy steps
        self._members: dict[str, _Member] = {}
        size = 0
        for name, length in (
            ("slots", max_requests),
            ("computed_before", max_requests),
            ("lengths", max_requests),
            ("query_starts", max_requests + 1),
        ):
            self._members[name] = _Member(size, size + length)
            size += length
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host_array = self._host.numpy()
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._token_slots = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._write_slots = [
            torch.full((max_tokens,), -1, dtype=torch.int64, device=device) for _ in groups
        ]
        self.history = torch.zeros(slots, build.max_model_len + 1, dtype=torch.int32, device=device)
        max_blocks = -(-build.max_model_len // block_tokens)
        self.tables = BlockTables(len(groups), slots, max_blocks, device)
        self._groups = tuple(groups)
        self._block_tokens = block_tokens
        self._fill_rows = build.bind(fill_rows)
        self._fill_slots = build.bind(fill_slots)

    def admit(self, admission: Admission) -> None:
        """Write a new request's known tokens into its slot's history."""
        known = torch.from_numpy(admission.token_ids).to(self.history.device)
        self.history[admission.slot, : len(known)] = known

    def remember(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Append sampled tokens to the history, where the next step finds them. All [sampled]."""
        self.history[slots, positions] = token_ids

    def fill(self, plan: StepPlan, shape: StepShape) -> StepInputs:
        """Stage, publish and fill one step's inputs."""
        self._stage(plan)
        self._device.copy_(self._host, non_blocking=True)
        self.tables.apply(plan.grants)
        return self._derive(plan, shape)

    def _stage(self, plan: StepPlan) -> None:
        requests = plan.scheduled_requests
        host = {name: self._host_array[m.start : m.stop] for name, m in self._members.items()}
        host["slots"][:requests] = plan.slots
        host["computed_before"][:requests] = plan.computed_before
        host["lengths"][:requests] = plan.computed_before + plan.query_lens
        host["query_starts"][0] = 0
        np.cumsum(plan.query_lens, out=host["query_starts"][1 : requests + 1])

    def _derive(self, plan: StepPlan, shape: StepShape) -> StepInputs:
        requests, tokens = plan.scheduled_requests, shape.running_tokens
        slots = self._view("slots", requests)
        lengths = self._view("lengths", requests)
        query_starts = self._view("query_starts", requests + 1)
        token_ids, positions = self._token_ids[:tokens], self._positions[:tokens]
        token_slots = self._token_slots[:tokens]
        self._fill_rows(
            slots,
            self._view("computed_before", requests),
            query_starts,
            self.history,
            token_ids,
            positions,
            token_slots,
        )
        longest = int((plan.computed_before + plan.query_lens).max(initial=1))
        blocks = -(-longest // self._block_tokens)
        rows: dict[str, Rows] = {}
        for group, table, buffer in zip(
            self._groups, self.tables.tables, self._write_slots, strict=True
        ):
            write_slots = buffer[:tokens]
            self._fill_slots(
                token_slots,
                positions,
                table,
                shape.scheduled_tokens,
                self._block_tokens,
                write_slots,
            )
            block_table = table[:, :blocks].index_select(0, slots)
            rows[group.name] = Rows(block_table, lengths, write_slots, self._block_tokens)
        ends = plan.query_lens.cumsum()
        logit_rows = torch.from_numpy(ends[plan.sampled_rows].astype(np.int64) - 1)
        return StepInputs(
            token_ids=token_ids,
            positions=positions,
            query_starts=query_starts,
            logit_rows=logit_rows.to(token_ids.device),
            rows=rows,
            prefill_requests=plan.prefill_rows,
            prefill_tokens=int(plan.query_lens[: plan.prefill_rows].sum()),
        )

    def _view(self, name: str, length: int) -> Tensor:
        start = self._members[name].start
        return self._device[start : start + length]
