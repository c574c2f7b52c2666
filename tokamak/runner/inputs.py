"""Fixed device buffers of a step's inputs: staged on the host, published in one copy, filled on the device.

In: a StepPlan and its StepShape. Out: StepInputs whose tensors keep their addresses from step to step.
Nothing here depends on what the step before this one sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokamak.cache.groups import CacheGroup
from tokamak.cache.launch import LaunchStorage
from tokamak.cache.tables import BlockTables
from tokamak.cache.view import PagedBuffers, PagedView, Site
from tokamak.core.inputs import StepInputs
from tokamak.core.plan import Admission, Grants, Int32s, StepPlan, StepShape
from tokamak.device.staging import staged
from tokamak.device.waits import HostWaits
from tokamak.layers.attention.tail import TailRows
from tokamak.layers.build import Build
from tokamak.ops.step_prep import fill_indptrs, fill_step, fill_unit_tiles
from tokamak.ops.walk_plan import fill_walk_plan
from tokamak.ops.walk_plan.sizes import walk_programs
from tokamak.runner.dummy import NULL_SLOT
from tokamak.runner.host_arena import Half, check_room, lay_out

GRANT_COLUMNS = 4

GRANTS_A_COPY = 16
"""Grants are copied by so many, so that there are few lengths of copies."""


@dataclass(slots=True)
class _Staged:
    """What `publish` and `fill` must know of the step that is staged."""

    half: Half
    requests: int
    tokens: int
    sampled: int
    logit_rows: int
    grants: int
    columns: int
    """Entries of the block tables that differ from null in this step, or did in an earlier one."""


@dataclass(frozen=True, slots=True)
class _Views:
    """Prefix views of the device buffers for one size of step."""

    inputs: StepInputs
    slots: Tensor
    computed_before: Tensor
    write_slots: Tensor
    block_tables: Tensor


class InputArena:
    """Packed int32 members, the token history of every slot, and the block tables.

    Args:
        build: device, length of the longest request, and the backends of the fill.
        groups: cache groups, in the order of a plan's grants.
        max_requests: request rows of the largest step, padding included; also slots beside the null slot.
        max_tokens: token rows of the largest step, padding included.
        block_tokens: tokens a block holds.
        max_tail: token rows that late layers run in the largest step; 0 for a model that always runs whole.
        site: tells derived tables where they are read (`cache/view.py`); None checks nothing.
        waits: counts a wait for a copy that is still running two steps later.
    """

    def __init__(
        self,
        build: Build,
        groups: Sequence[CacheGroup],
        *,
        max_requests: int,
        max_tokens: int,
        block_tokens: int,
        max_tail: int = 0,
        site: Site | None = None,
        waits: HostWaits | None = None,
    ) -> None:
        device, slots = build.device, max_requests + 1  # slot 0 is the null slot of dummy steps
        max_blocks = -(-build.max_model_len // block_tokens)
        self._limits = (max_requests, max_tokens, build.max_model_len)
        self._block_tokens = block_tokens
        self._waits = waits or HostWaits()
        self._grant_room = len(groups) * (max_requests + max_blocks)
        self._layout, size = lay_out(
            slots=max_requests,
            computed_before=max_requests,
            lengths=max_requests,
            query_starts=max_requests + 1,
            logit_rows=max_tokens,
            sampled_slots=max_requests,
            sampled_positions=max_requests,
            tail_rows=max_tail,
            tail_starts=max_requests + 1,
            tail_first=max_requests,
            # Last, so that the published prefix ends with the grants in use.
            grants=GRANT_COLUMNS * self._grant_room,
        )
        self._halves = (Half(self._layout, size, device), Half(self._layout, size, device))
        self._packed = torch.zeros(size, dtype=torch.int32, device=device)
        self._member = {name: self._packed[place] for name, place in self._layout.items()}
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._write_slots = torch.full(
            (len(groups), max_tokens), -1, dtype=torch.int64, device=device
        )
        self._block_tables = torch.zeros(
            (len(groups), max_requests, max_blocks), dtype=torch.int32, device=device
        )
        self.history = torch.zeros(slots, build.max_model_len + 1, dtype=torch.int32, device=device)
        """Known and sampled tokens of every slot, int32 [slots, positions]."""
        self.tables = BlockTables(len(groups), slots, max_blocks, device)
        self._reach = np.zeros(max_requests, dtype=np.int32)
        self._reached = (0, 0)
        self._counting = np.arange(max_requests + 1, dtype=np.int32)
        self._copies: dict[int, tuple[Tensor, dict[Half, Tensor]]] = {}
        self._no_grants = self._packed.new_zeros((GRANT_COLUMNS, 0))
        self._decode_views: dict[tuple[int, int, int], _Views] = {}
        self._staged: _Staged | None = None
        self._turn = 0
        self._fill = build.bind(fill_step)
        bind_walk, programs = build.bind(fill_walk_plan), walk_programs(build.facts, device)
        bind_indptrs, bind_tiles = build.bind(fill_indptrs), build.bind(fill_unit_tiles)
        self.buffers = {
            group.name: PagedBuffers(
                block_table=self._block_tables[at],
                lengths=self._member["lengths"],
                write_slots=self._write_slots[at],
                query_starts=self._member["query_starts"],
                block_tokens=block_tokens,
                fill_indptrs=bind_indptrs,
                fill_unit_tiles=bind_tiles,
                launch=LaunchStorage(programs=programs, fill=bind_walk),
                site=site,
            )
            for at, group in enumerate(groups)
        }
        """By cache group."""
        self.tail_rows, self.tail_starts = self._member["tail_rows"], self._member["tail_starts"]
        self.tail_first = self._member["tail_first"]
        """Where `stage_tail` is published."""

    def admit(self, admission: Admission) -> None:
        """Write a new request's known tokens into its slot's history; its block table starts empty."""
        known = staged(admission.token_ids, self.history.device)
        self.history[admission.slot, : len(known)] = known
        self.tables.clear(admission.slot)

    def remember(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Append sampled tokens to the history, where the next step finds them. All [sampled]."""
        self.history[slots, positions] = token_ids

    @property
    def sampled(self) -> tuple[Tensor, Tensor]:
        """Slot and position of every token the filled step samples, int32 [sampled] on the device."""
        count = self._now().sampled
        return self._member["sampled_slots"][:count], self._member["sampled_positions"][:count]

    def sampled_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """Where slots and positions of sampled tokens lie, int32 [rows]; in decode steps padding is slot 0."""
        return self._member["sampled_slots"][:rows], self._member["sampled_positions"][:rows]

    def stage(self, plan: StepPlan, shape: StepShape) -> None:
        """Write a step's numbers into the half of the host arena whose turn it is.

        Rows past the plan's are padding: slot 0, which holds null blocks; in uniform decode they have
        q_width token rows each and see as many tokens, in other steps they have none.

        Raises:
            ArenaOverflow: the step is larger than the buffers.
            ShapeInvariant: the shape runs fewer rows than the plan has.
        """
        check_room(plan, shape, self._limits)
        half = self._halves[self._turn]
        if half.copied is not None and not half.copied.query():
            self._waits.wait(half.copied.synchronize)
        self._turn = 1 - self._turn
        real, running = plan.scheduled_requests, shape.running_requests
        member, starts, lengths = half.member, half.member["query_starts"], plan.lengths
        member["slots"][:real] = plan.slots
        member["computed_before"][:real] = plan.computed_before
        member["lengths"][:real] = lengths
        if running > real:
            member["slots"][real:running] = NULL_SLOT
            member["computed_before"][real:running] = 0
            member["lengths"][real:running] = max(shape.q_width, 1)
            member["sampled_slots"][real:running] = NULL_SLOT
            member["sampled_positions"][real:running] = 0
        sampled = len(plan.sampled_rows)
        if shape.q_width == 1 and plan.scheduled_tokens == real:
            # One token a row, padding included: rows and tokens are counted alike.
            starts[: running + 1] = self._counting[: running + 1]
            member["sampled_slots"][:real] = plan.slots
            member["sampled_positions"][:real] = lengths
            member["logit_rows"][:real] = self._counting[:real]
            logit_rows = real
        else:
            starts[0] = 0
            np.cumsum(plan.query_lens, out=starts[1 : real + 1])
            steps = self._counting[1 : running - real + 1]
            starts[real + 1 : running + 1] = starts[real] + shape.q_width * steps
            member["sampled_slots"][:sampled] = plan.slots[plan.sampled_rows]
            member["sampled_positions"][:sampled] = lengths[plan.sampled_rows]
            logit_rows = _stage_logit_rows(plan, starts, member["logit_rows"])
        self._staged = _Staged(
            half=half,
            requests=running,
            tokens=shape.running_tokens,
            sampled=sampled,
            logit_rows=logit_rows,
            grants=self._stage_grants(plan.grants, member["grants"]),
            columns=self._columns(running, plan.longest_tokens),
        )

    def stage_tail(self, tail: TailRows, running_tokens: int) -> None:
        """Write which rows late layers run for beside what `stage` has written, padded to so many."""
        staged = self._now()
        member = staged.half.member
        starts = member["tail_starts"][: staged.requests + 1]
        tail.stage(
            member["tail_rows"][:running_tokens], starts, member["tail_first"][: staged.requests]
        )

    def publish(self) -> None:
        """Copy what is staged to the device, without waiting for the copy."""
        staged = self._now()
        half = staged.half
        target, sources = self._copy_of(-(-staged.grants // GRANTS_A_COPY))
        target.copy_(sources[half], non_blocking=True)
        if half.copied is not None:
            half.copied.record()

    def fill(self, plan: StepPlan, shape: StepShape) -> StepInputs:
        """Launch the fill of the published step and return its inputs: views of fixed buffers."""
        staged = self._now()
        views = self._views(shape, staged)
        grants = self._no_grants
        if staged.grants:
            used = self._member["grants"][: GRANT_COLUMNS * staged.grants]
            grants = used.view(GRANT_COLUMNS, staged.grants)
        inputs = views.inputs
        self._fill(
            views.slots,
            views.computed_before,
            inputs.query_starts,
            grants,
            self.history,
            self.tables.tables,
            plan.scheduled_requests,
            plan.scheduled_tokens,
            self._block_tokens,
            staged.columns,
            inputs.token_ids,
            inputs.positions,
            views.write_slots,
            views.block_tables,
        )
        return inputs

    def _copy_of(self, parts: int) -> tuple[Tensor, dict[Half, Tensor]]:
        """What is copied with so many parts of the grants: into which view, and from which one of each half."""
        if parts not in self._copies:
            used = self._layout["grants"].start + GRANT_COLUMNS * GRANTS_A_COPY * parts
            sources = {half: half.packed[:used] for half in self._halves}
            self._copies[parts] = (self._packed[:used], sources)
        return self._copies[parts]

    def _now(self) -> _Staged:
        assert self._staged is not None, "no step is staged"
        return self._staged

    def _stage_grants(self, grants: Grants, packed: Int32s) -> int:
        """Write the plan's grants; returns how many.

        A plan that admits several very long requests can grant more than the arena holds. What is too
        much is written to the tables at once, one arena's room at a time: rare, and each round is a copy.
        """
        count = len(grants)
        if not count:
            return 0
        columns = (grants.groups, grants.slots, grants.entries, grants.block_ids)
        while count > self._grant_room:
            first = len(grants) - count
            self.tables.apply(_part(columns, first, first + self._grant_room))
            count -= self._grant_room
        if count:
            packed = packed[: GRANT_COLUMNS * count].reshape(GRANT_COLUMNS, count)
            for row, column in zip(packed, columns, strict=True):
                row[:] = column[len(column) - count :]
        return count

    def _columns(self, running: int, longest: int) -> int:
        """Columns of the block tables to write: this step's, and those an earlier one left behind."""
        blocks = -(-longest // self._block_tokens)
        if self._reached[0] >= running and self._reached[1] == blocks:
            return blocks  # the step before left exactly these
        self._reached = (running, blocks)
        reach = self._reach[:running]
        columns = max(blocks, int(reach.max(initial=0)))
        reach[:] = blocks
        return columns

    def _views(self, shape: StepShape, staged: _Staged) -> _Views:
        """Views for a size; those of uniform decode steps, few and used again, are kept."""
        if not shape.q_width:
            return self._make_views(staged, 0)
        size = (staged.requests, staged.tokens, staged.logit_rows)
        if size not in self._decode_views:
            self._decode_views[size] = self._make_views(staged, shape.q_width)
        return self._decode_views[size]

    def _make_views(self, staged: _Staged, q_width: int) -> _Views:
        requests, tokens, member = staged.requests, staged.tokens, self._member
        rows: dict[str, PagedView] = {
            name: buffers.view(requests, tokens) for name, buffers in self.buffers.items()
        }
        inputs = StepInputs(
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            query_starts=member["query_starts"][: requests + 1],
            logit_rows=member["logit_rows"][: staged.logit_rows],
            rows=rows,
            q_width=q_width,
            history=self.history,
            slots=member["slots"][:requests],
        )
        return _Views(
            inputs=inputs,
            slots=member["slots"][:requests],
            computed_before=member["computed_before"][:requests],
            write_slots=self._write_slots[:, :tokens],
            block_tables=self._block_tables[:, :requests],
        )


def _stage_logit_rows(plan: StepPlan, starts: Int32s, out: Int32s) -> int:
    """Write the last token row of every final prefill row, then all of decode rows; returns how many."""
    prefill = plan.prefill_rows
    ends = starts[1 : prefill + 1][plan.final_chunk[:prefill]]
    first, end = int(starts[prefill]), plan.scheduled_tokens
    count = len(ends) + end - first
    out[: len(ends)] = ends - 1
    out[len(ends) : count] = np.arange(first, end, dtype=np.int32)
    return count


def _part(columns: tuple[Int32s, ...], first: int, end: int) -> Grants:
    groups, slots, entries, block_ids = (column[first:end] for column in columns)
    return Grants(groups=groups, slots=slots, entries=entries, block_ids=block_ids)
