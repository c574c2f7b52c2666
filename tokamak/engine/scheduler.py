"""Which requests run in the next step, and with how many tokens each.

In: waiting and running requests, free blocks of every cache group.
Out: a StepPlan. After the step, results come back and requests move on.
Integers only: no tensor is made here, so every test runs without a device.

The plan is made while the step before it still runs: a running request may have sampled tokens that the
host has not seen. What such a token was matters only when it is committed; a request that turns out to
have ended leaves a ghost row in the next step, whose result is dropped.

Every decode row passes here twice a step, so `_plan_decodes` and `commit` read and write plain fields of
requests: what has to be asked of others is asked where a block is full or a request ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tokamak.cache.holdings import Holdings, PrefixMatch
from tokamak.config.engine import SchedulerConfig
from tokamak.core.plan import Admission, BlockGrant, Grants, RowResult, StepPlan, StepResult
from tokamak.core.request import FinishReason, Request, RequestState
from tokamak.engine.policy import chunk_tokens, serving_order, spare_blocks, victim


class Progress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one committed row did to its request. In no cycle, like all that is made for every row."""

    request: Request
    row: RowResult
    stop_id: int | None


@dataclass(frozen=True, slots=True)
class _StepRows:
    """The rows of a step in flight: their requests, and the tokens of each written once it has run."""

    requests: tuple[Request, ...]
    written_tokens: list[int]


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
    prefill: list[Request] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    """Tokens of each prefill row."""
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
        self._in_flight: dict[int, _StepRows] = {}
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
        request.most_tokens = min(len(request.prompt_ids) + request.max_tokens, self._max_model_len)
        self._requests[request.request_id] = request
        insort(self.waiting, request, key=self._order)
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
        started = self._plan_decodes(draft)
        self._plan_started_prefills(draft, started)
        self._plan_admissions(draft)
        if not draft:
            return None
        plan = self._freeze(draft)
        self._in_flight[plan.seq] = _StepRows(
            (*draft.prefill, *draft.decode), plan.lengths.tolist()
        )
        self.counters.scheduled_tokens += plan.scheduled_tokens
        return plan

    def _plan_decodes(self, draft: _Draft) -> list[Request]:
        """One more token for requests whose prompt is done; returns those whose prompt is not."""
        started: list[Request] = []
        decode, budget = draft.decode, draft.budget
        # A copy, as requests may be preempted meanwhile: those behind the one that is looked at.
        for request in tuple(self.running):
            computed = request.computed_tokens
            if computed < request.prefill_tokens:
                started.append(request)
                continue
            # The token after the computed ones is sampled, seen or not.
            if computed + 1 >= request.most_tokens:
                continue
            if len(decode) == budget:
                break
            if computed >= request.room_tokens and not self._grow_or_preempt(draft, request):
                continue
            request.computed_tokens = computed + 1
            decode.append(request)
        draft.budget -= len(decode)
        return started

    def _grow_or_preempt(self, draft: _Draft, request: Request) -> bool:
        """Room for one more token, taken from the last in line if need be; False if that is itself."""
        while True:
            grants = self.holdings.grow(request, request.computed_tokens + 1)
            if grants is not None:
                draft.grants.extend(grants)
                return True
            last = victim(self.running, self._order)
            self._preempt(last)
            if last is request:
                return False

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the queue; its tokens are computed again later."""
        self._leave(request)
        request.state = RequestState.WAITING
        request.computed_tokens = 0
        request.awaited_step = max(
            (seq for seq, rows in self._in_flight.items() if request in rows.requests), default=-1
        )
        request.preemptions += 1
        self.counters.preemptions += 1
        insort(self.waiting, request, key=self._order)

    def _plan_started_prefills(self, draft: _Draft, started: Iterable[Request]) -> None:
        """Go on with prompts that were cut; their blocks were taken at admission."""
        for request in started:
            if draft.budget == 0:
                return
            if request.state is RequestState.RUNNING:  # and was not preempted for a decode row
                self._add_chunk(draft, request)

    def _add_chunk(self, draft: _Draft, request: Request) -> None:
        tokens = chunk_tokens(request.prefill_tokens - request.computed_tokens, draft.budget)
        draft.prefill.append(request)
        draft.chunks.append(tokens)
        draft.budget -= tokens
        request.computed_tokens += tokens
        draft.grants.extend(self.holdings.reach(request, request.computed_tokens))

    def _plan_admissions(self, draft: _Draft) -> None:
        """Admit waiting requests in order, as long as slots, blocks and the step have room."""
        while self.waiting and self._free_slots and draft.budget > 0:
            request = self.waiting[0]
            if request.awaited_step in self._in_flight:
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
        insort(self.running, request, key=self._order)
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
                first_late=self.holdings.first_late(request),
            )
        )
        self._add_chunk(draft, request)

    def _freeze(self, draft: _Draft) -> StepPlan:
        """The plan of a draft, whose requests count its tokens as computed already."""
        requests, decode_rows = draft.prefill + draft.decode, len(draft.decode)
        lens = np.array(draft.chunks + [1] * decode_rows, dtype=np.int32)
        computed = np.array([request.computed_tokens for request in requests], dtype=np.int32)
        final = np.zeros(len(requests), dtype=np.bool_)
        for row, request in enumerate(draft.prefill):
            is_last = request.computed_tokens == request.prefill_tokens
            final[row] = is_last and request.max_tokens > 0
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        return StepPlan(
            seq=seq,
            request_ids=tuple([request.request_id for request in requests]),
            slots=np.array([request.slot for request in requests], dtype=np.int32),
            query_lens=lens,
            computed_before=computed - lens,
            prefill_rows=len(draft.prefill),
            final_chunk=final,
            admissions=tuple(draft.admissions),
            grants=Grants.of(draft.grants),
        )

    # --- after a step ---------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[Progress]:
        """Join a step's tokens to their requests; ended ones leave. Ghost rows are dropped."""
        progress: list[Progress] = []
        finished, generated_tokens = RequestState.FINISHED, 0
        rows = self._in_flight.pop(result.seq)
        for request, written_tokens, row in zip(
            rows.requests, rows.written_tokens, result.rows, strict=True
        ):
            if request.state is finished:
                continue
            token_ids, output_ids, stop_id = row.token_ids, request.output_ids, None
            output_ids += token_ids
            generated_tokens += len(token_ids)
            if row.prompt_logprobs:
                request.scored_tokens += len(row.prompt_logprobs)
            if written_tokens >= request.publish_tokens:
                self.holdings.publish(request, written_tokens)
            for token_id in token_ids:
                if token_id in request.stop_ids:
                    stop_id = token_id
                    break
            if (
                stop_id is not None
                or len(request.prompt_ids) + len(output_ids) >= request.most_tokens
                or row.complete
                or row.error
            ):
                prompt_done = written_tokens >= request.prefill_tokens
                reason = _reason_to_end(row, stop_id, prompt_done=prompt_done)
                if reason is not None:
                    self.finish(request, reason)
            progress.append(Progress(request=request, row=row, stop_id=stop_id))
        self.counters.generated_tokens += generated_tokens
        return progress

    def fail(self, seq: int) -> list[Request]:
        """A whole step failed: its requests end with an error. Returns those that were alive."""
        failed = [
            request
            for request in self._in_flight.pop(seq).requests
            if request.state is not RequestState.FINISHED
        ]
        for request in failed:
            self.finish(request, FinishReason.ERROR)
        return failed


def _reason_to_end(
    row: RowResult, stop_id: int | None, *, prompt_done: bool
) -> FinishReason | None:
    """Why a request ends with a row that failed, holds a stop token, is complete, or reaches the limit.

    One that wants no token is at its limit from the start; it ends with its prompt.
    """
    if row.error:
        return FinishReason.ERROR
    if stop_id is not None or row.complete:
        return FinishReason.STOP
    return FinishReason.LENGTH if prompt_done else None
