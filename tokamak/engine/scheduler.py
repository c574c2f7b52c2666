"""Which requests run in the next step, and with how many tokens each.

In: waiting and running requests, free blocks of every cache group.
Out: a StepPlan. After the step, results come back and requests move on.
Integers only: no tensor is made here, so every test runs without a device.

The plan is made while the step before it still runs: a running request may have sampled tokens that the
host has not seen (`in_flight_tokens`). What such a token was matters only when it is committed; a
request that turns out to have ended leaves a ghost row in the next step, whose result is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from tokamak.cache.holdings import Holdings, PrefixMatch
from tokamak.config.engine import SchedulerConfig
from tokamak.core.plan import Admission, BlockGrant, Grants, RowResult, StepPlan, StepResult
from tokamak.core.request import FinishReason, Request, RequestState
from tokamak.engine.policy import chunk_tokens, serving_order, spare_blocks, victim


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one committed row did to its request."""

    request: Request
    row: RowResult
    stop_id: int | None


@dataclass(frozen=True, slots=True)
class _PlannedRow:
    """A row of a step in flight: its request, and the tokens written once the step has run."""

    request: Request
    computed_after: int


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    scheduled_tokens: int = 0


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    budget: int
    prefill: list[tuple[Request, int]] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    grants: list[BlockGrant] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)


class Scheduler:
    """Continuous batching with chunked prefill, prefix reuse and preemption by recomputation."""

    def __init__(self, config: SchedulerConfig, holdings: Holdings, max_model_len: int) -> None:
        self.holdings = holdings
        self.counters = SchedulerCounters()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._config = config
        self._max_model_len = max_model_len
        self._order = serving_order(config.policy)
        self._requests: dict[str, Request] = {}
        self._free_slots = list(range(config.max_num_seqs, 0, -1))
        self._in_flight: dict[int, tuple[_PlannedRow, ...]] = {}
        self._arrivals = 0
        self._next_seq = 0

    # --- requests come and go -------------------------------------------------------------------

    @property
    def unfinished_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    @property
    def waiting_tokens(self) -> int:
        """Known tokens of all waiting requests."""
        return sum(request.known_tokens for request in self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Its length was checked against the context by whoever made it."""
        assert request.request_id not in self._requests, f"{request.request_id} is added twice"
        self._arrivals += 1
        request.arrival_order = self._arrivals
        self._requests[request.request_id] = request
        self.waiting.append(request)
        self.waiting.sort(key=self._order)
        self.counters.prompt_tokens += len(request.prompt_ids)

    def find(self, request_id: str) -> Request | None:
        """The unfinished request of that name."""
        return self._requests.get(request_id)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests at once; unknown ids are those that ended a moment ago."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self.finish(request, FinishReason.ABORT)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request and give back its slot and blocks. Steps in flight keep a ghost row of it.

        Freed blocks may be given away before those steps have run: steps run one after the other, so
        what the ghost still writes is written before a new owner's first row.
        """
        request.finish_reason = reason
        self._leave(request)
        request.state = RequestState.FINISHED
        del self._requests[request.request_id]
        self.counters.finished_requests += 1

    def _leave(self, request: Request) -> None:
        """Take a request off its list and give back what it holds."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self._free_slots.append(request.slot)
            request.slot = -1
        else:
            self.waiting.remove(request)
        self.holdings.release(request)

    # --- before a step --------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Choose the next step: decode rows first, then prompts under way, then new ones."""
        draft = _Draft(budget=self._config.max_num_batched_tokens)
        self._plan_decodes(draft)
        self._plan_started_prefills(draft)
        self._plan_admissions(draft)
        if not draft:
            return None
        plan = self._freeze(draft)
        for request, tokens in draft.prefill:
            self._advance(request, tokens)
        for request in draft.decode:
            self._advance(request, 1)
        rows = (*(request for request, _ in draft.prefill), *draft.decode)
        self._in_flight[plan.seq] = tuple(_PlannedRow(r, r.computed_tokens) for r in rows)
        self.counters.scheduled_tokens += plan.scheduled_tokens
        return plan

    def _plan_decodes(self, draft: _Draft) -> None:
        for request in sorted(self.running, key=self._order):
            if draft.budget == 0:
                return
            if request.state is not RequestState.RUNNING or not self._wants_decode(request):
                continue
            grants = self._grow_or_preempt(request)
            if grants is not None:
                draft.grants.extend(grants)
                draft.decode.append(request)
                draft.budget -= 1

    def _wants_decode(self, request: Request) -> bool:
        """Whether the prompt is done and another token may be sampled."""
        return request.computed_tokens >= request.prefill_tokens and not self._is_full(request)

    def _is_full(self, request: Request) -> bool:
        """Whether the tokens sampled so far, seen or not, use up the request's limit."""
        sampled = len(request.output_ids) + request.in_flight_tokens
        return sampled >= request.max_tokens or request.total_tokens >= self._max_model_len

    def _grow_or_preempt(self, request: Request) -> list[BlockGrant] | None:
        """Room for one more token, taken from the last in line if need be; None if that is itself."""
        while True:
            grants = self.holdings.grow(request, request.computed_tokens + 1)
            if grants is not None:
                return grants
            last = victim(self.running, self._order)
            self._preempt(last)
            if last is request:
                return None

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the queue; its tokens are computed again later."""
        self._leave(request)
        request.state = RequestState.WAITING
        request.computed_tokens = 0
        request.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.append(request)
        self.waiting.sort(key=self._order)

    def _plan_started_prefills(self, draft: _Draft) -> None:
        """Go on with prompts that were cut; their blocks were taken at admission."""
        for request in sorted(self.running, key=self._order):
            if draft.budget == 0:
                return
            if request.computed_tokens < request.prefill_tokens:
                self._add_chunk(draft, request)

    def _add_chunk(self, draft: _Draft, request: Request) -> None:
        tokens = chunk_tokens(request.prefill_tokens - request.computed_tokens, draft.budget)
        draft.prefill.append((request, tokens))
        draft.budget -= tokens

    def _plan_admissions(self, draft: _Draft) -> None:
        """Admit waiting requests in order, as long as slots, blocks and the step have room."""
        while self.waiting and self._free_slots and draft.budget > 0:
            request = self.waiting[0]
            if request.in_flight_steps:
                return  # preempted a moment ago; its last token is still on its way
            match = self.holdings.match(request)
            needed = self.holdings.blocks_to_admit(match, request.known_tokens)
            spare = spare_blocks(len(self.running), request.preemptions)
            if needed + spare > self.holdings.free_blocks and (self.running or self._in_flight):
                return
            assert needed <= self.holdings.free_blocks, (
                f"{request.request_id} needs {needed} blocks and can never have them"
            )
            self._admit(draft, request, match)

    def _admit(self, draft: _Draft, request: Request, match: PrefixMatch) -> None:
        self.waiting.pop(0)
        request.state = RequestState.RUNNING
        request.slot = self._free_slots.pop()
        request.prefill_tokens = request.known_tokens
        request.computed_tokens = match.cached_tokens
        self.running.append(request)
        if request.cached_tokens < 0:
            request.cached_tokens = match.cached_tokens
            self.counters.cached_prompt_tokens += match.cached_tokens
        draft.grants.extend(self.holdings.admit(request, match, request.known_tokens))
        draft.admissions.append(
            Admission(
                request_id=request.request_id,
                slot=request.slot,
                token_ids=np.array(request.prompt_ids + request.output_ids, dtype=np.int32),
                prompt_tokens=len(request.prompt_ids),
                params=request.params,
                sibling=request.sibling,
                max_tokens=request.max_tokens,
                stop_ids=request.stop_ids,
                scored_tokens=request.scored_tokens,
            )
        )
        self._add_chunk(draft, request)

    def _freeze(self, draft: _Draft) -> StepPlan:
        requests = [request for request, _ in draft.prefill] + draft.decode
        lens = [tokens for _, tokens in draft.prefill] + [1] * len(draft.decode)
        final = [
            request.computed_tokens + tokens == request.prefill_tokens and request.max_tokens > 0
            for request, tokens in draft.prefill
        ]
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        return StepPlan(
            seq=seq,
            request_ids=tuple(request.request_id for request in requests),
            slots=np.array([request.slot for request in requests], dtype=np.int32),
            query_lens=np.array(lens, dtype=np.int32),
            computed_before=np.array([r.computed_tokens for r in requests], dtype=np.int32),
            prefill_rows=len(draft.prefill),
            final_chunk=np.array(final + [False] * len(draft.decode), dtype=np.bool_),
            admissions=tuple(draft.admissions),
            grants=Grants.of(draft.grants),
        )

    def _advance(self, request: Request, tokens: int) -> None:
        """Count a planned row as done: the next plan starts from there."""
        request.computed_tokens += tokens
        request.in_flight_steps += 1
        if request.computed_tokens >= request.prefill_tokens and request.max_tokens > 0:
            request.in_flight_tokens += 1

    # --- after a step ---------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[Progress]:
        """Join a step's tokens to their requests; ended ones leave. Ghost rows are dropped."""
        progress: list[Progress] = []
        planned_rows = self._in_flight.pop(result.seq)
        for planned, row in zip(planned_rows, result.rows, strict=True):
            request = planned.request
            request.in_flight_steps -= 1
            request.in_flight_tokens -= len(row.token_ids)
            if request.state is not RequestState.FINISHED:
                progress.append(self._commit_row(planned, row))
        return progress

    def _commit_row(self, planned: _PlannedRow, row: RowResult) -> Progress:
        request = planned.request
        request.scored_tokens += len(row.prompt_logprobs)
        request.output_ids.extend(row.token_ids)
        self.counters.generated_tokens += len(row.token_ids)
        if request.state is RequestState.RUNNING:
            self.holdings.publish(request, planned.computed_after)
        stop_id = next((i for i in row.token_ids if i in request.stop_ids), None)
        reason = self._reason_to_end(request, row, stop_id)
        if reason is not None:
            self.finish(request, reason)
        return Progress(request=request, row=row, stop_id=stop_id)

    def _reason_to_end(
        self, request: Request, row: RowResult, stop_id: int | None
    ) -> FinishReason | None:
        if row.error:
            return FinishReason.ERROR
        if stop_id is not None or row.complete:
            return FinishReason.STOP
        if not self._is_full(request) or request.in_flight_steps:
            return None
        # A request that wants no token is full from the start; it ends with its prompt.
        prompt_done = bool(request.output_ids) or request.computed_tokens >= request.prefill_tokens
        return FinishReason.LENGTH if prompt_done else None

    def fail(self, seq: int) -> list[Request]:
        """A whole step failed: its requests end with an error. Returns those that were alive."""
        failed: list[Request] = []
        for planned in self._in_flight.pop(seq):
            request = planned.request
            request.in_flight_steps -= 1
            if request.state is not RequestState.FINISHED:
                self.finish(request, FinishReason.ERROR)
                failed.append(request)
        return failed
