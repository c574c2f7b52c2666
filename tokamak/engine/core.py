"""One turn of the loop: take messages, plan, run, commit, report.

The loop is one step ahead: while a step runs, the next is planned and launched with tokens the host has
not seen. A turn waits for the device once, for the older step. Not thread-safe: one thread drives it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable

import numpy as np

from tokamak.cache.holdings import Holdings
from tokamak.config.engine import EngineConfig
from tokamak.core.plan import StepResult, TokenLogprobs
from tokamak.core.request import FinishReason, Request
from tokamak.engine.executor import Executor, InFlight, InProcessExecutor
from tokamak.engine.messages import (
    AddRequest,
    EngineReport,
    EngineStats,
    PositionLogprobs,
    Ready,
    RequestUpdate,
)
from tokamak.engine.report import engine_report
from tokamak.engine.scheduler import Progress, Scheduler
from tokamak.errors import FatalError, StepError
from tokamak.telemetry.phases import RequestPhases

log = logging.getLogger(__name__)

SECONDS_A_WAITING_REQUEST = 1.0
"""Before anything was measured: how long a place in the queue takes."""

MOST_RETRY_AFTER_S = 60.0


class EngineCore:
    """Requests in, token ids out."""

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        self._executor = executor or InProcessExecutor(config)
        rank = self._executor.rank
        self._config = config = rank.start.config
        self._holdings = Holdings(
            rank.start.groups,
            block_tokens=config.cache.block_tokens,
            blocks=rank.start.memory.group_blocks,
            reuse=config.cache.prefix_caching,
        )
        self._scheduler = Scheduler(config.scheduler, self._holdings, config.model.max_model_len)
        self._launched: deque[InFlight] = deque()
        self._refused: list[RequestUpdate] = []
        self._phases = RequestPhases()
        self._steps = 0
        self._running_tokens = 0
        self._step_seconds = 0.0
        self._last_token_s = 0.0
        self._last_turn_s = 0.0

    def ready(self) -> Ready:
        """What a front end must know of the loaded engine."""
        rank, config = self._executor.rank, self._config
        return Ready(
            max_model_len=config.model.max_model_len,
            vocab_tokens=config.model.facts.vocab_tokens,
            block_tokens=config.cache.block_tokens,
            total_blocks=self._holdings.usable_blocks,
            choices=[(c.op, c.backend, c.why) for c in rank.build.choices.values()],
            load_s=rank.load_s,
        )

    # --- requests -------------------------------------------------------------------------------

    def add(self, message: AddRequest) -> None:
        """Queue a request; a refusal comes out of the next step as an update with an error."""
        refusal = self._refusal(message)
        if refusal is not None:
            self._refused.append(refusal)
            return
        self._scheduler.add(
            Request(
                request_id=message.request_id,
                prompt_ids=list(message.prompt_ids),
                params=message.params,
                max_tokens=message.max_tokens,
                stop_ids=frozenset(message.stop_ids),
                sibling=message.sibling,
                priority=message.priority,
                cache_salt=message.cache_salt,
                arrival_s=time.monotonic(),
            )
        )
        self._phases.queued(message.request_id, time.monotonic())

    def _refusal(self, message: AddRequest) -> RequestUpdate | None:
        """Why a request cannot be queued, or None."""
        scheduler, limits = self._scheduler, self._config.scheduler
        if scheduler.find(message.request_id) is not None:
            return _refuse(message, f"request id {message.request_id!r} is already in use")
        tokens = len(message.prompt_ids)
        longest = min(tokens + message.max_tokens, self._config.model.max_model_len)
        if self._holdings.blocks_for(longest) > self._holdings.usable_blocks:
            held = self._holdings.usable_blocks * self._holdings.block_tokens
            return _refuse(
                message,
                f"prompt and max_tokens need {longest} tokens of cache, and the cache holds {held}",
                field="max_tokens",
            )
        waiting, waiting_tokens = len(scheduler.waiting), scheduler.waiting_tokens
        if waiting >= limits.max_waiting_requests:
            return self._overloaded(
                message, f"{waiting} requests wait, as many as max_waiting_requests allows"
            )
        if waiting and waiting_tokens + tokens > limits.max_waiting_tokens:
            return self._overloaded(
                message,
                f"{waiting_tokens} prompt tokens wait; {tokens} more pass max_waiting_tokens "
                f"{limits.max_waiting_tokens}",
            )
        return None

    def _overloaded(self, message: AddRequest, text: str) -> RequestUpdate:
        """A refusal that says when to come back: the time the queue has lately taken per request."""
        finished = self._scheduler.counters.finished_requests
        each = self._step_seconds / finished if finished else SECONDS_A_WAITING_REQUEST
        retry_after_s = min(MOST_RETRY_AFTER_S, max(1.0, each * len(self._scheduler.waiting)))
        return _refuse(message, text, kind="overloaded", retry_after_s=retry_after_s)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; no update is sent for them. Unknown ids ended a moment ago."""
        request_ids = list(request_ids)
        self._scheduler.abort(request_ids)
        self._phases.ended(request_ids, time.monotonic())

    def reset_prefix_cache(self) -> None:
        """Forget every reusable prefix that no request holds."""
        self._holdings.forget_prefixes()

    # --- steps ----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._scheduler.unfinished_requests or self._launched or self._refused)

    def step(self) -> list[RequestUpdate]:
        """One turn: launch the next step, then wait for the one before it and commit its tokens."""
        updates, self._refused = self._refused, []
        if not self._launched:
            self._last_turn_s = time.monotonic()
        plan = self._scheduler.plan()
        if plan is not None:
            self._phases.admitted((each.request_id for each in plan.admissions), time.monotonic())
            self._launched.append(self._executor.launch(plan))
        if len(self._launched) > 1 or (self._launched and plan is None):
            updates += self._commit_oldest()
        return updates

    def work_ahead(self) -> bool:
        """Record a step size that was put off; whether there are more."""
        return self._executor.work_ahead()

    def _commit_oldest(self) -> list[RequestUpdate]:
        launched = self._launched.popleft()
        plan = launched.plan
        self._steps += 1
        self._running_tokens += plan.scheduled_tokens
        try:
            result = launched.take()
        except FatalError:
            raise
        except Exception as error:
            return self._fail_step(launched, error)
        finally:
            now = time.monotonic()
            self._step_seconds += now - self._last_turn_s
            self._last_turn_s = now
        finals = np.flatnonzero(plan.final_chunk[: plan.prefill_rows]).tolist()
        self._phases.prefilled((plan.request_ids[row] for row in finals), self._last_turn_s)
        return self._commit(result)

    def _commit(self, result: StepResult) -> list[RequestUpdate]:
        updates: list[RequestUpdate] = []
        with self._executor.rank.runner.spans.span("deliver"):
            for progress in self._scheduler.commit(result):
                row, finish_reason = progress.row, progress.request.finish_reason
                if row.token_ids:
                    self._last_token_s = self._last_turn_s
                if row.logprobs or row.prompt_logprobs or row.error:
                    updates.append(_update(progress))
                elif row.token_ids or finish_reason is not None:
                    updates.append(_plain_update(progress))
                if finish_reason is not None:
                    self._phases.ended([progress.request.request_id], self._last_turn_s)
        return updates

    def _fail_step(self, launched: InFlight, error: Exception) -> list[RequestUpdate]:
        """End the requests of a step that raised; everyone else goes on."""
        plan = launched.plan
        failed = self._scheduler.fail(plan.seq)
        self._phases.ended((request.request_id for request in failed), self._last_turn_s)
        failure = StepError(
            f"step {plan.seq} failed with {type(error).__name__}: {error}; it had "
            f"{plan.prefill_rows} prefill and {plan.scheduled_requests - plan.prefill_rows} decode "
            f"rows, {plan.scheduled_tokens} tokens, of requests {', '.join(plan.request_ids)}"
            + "".join(f"; {note}" for note in getattr(error, "__notes__", []))
        )
        log.error("%s", failure, exc_info=error)
        return [
            RequestUpdate(
                request_id=request.request_id,
                finish_reason=FinishReason.ERROR,
                error=f"{type(error).__name__}: {error}",
                error_kind="engine",
            )
            for request in failed
        ]

    # --- numbers --------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Gauges and counters as of the last turn."""
        scheduler = self._scheduler
        counters = scheduler.counters
        return EngineStats(
            running_requests=len(scheduler.running),
            waiting_requests=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting_tokens,
            free_blocks=self._holdings.free_blocks,
            total_blocks=self._holdings.usable_blocks,
            steps=self._steps,
            scheduled_tokens=counters.scheduled_tokens,
            running_tokens=self._running_tokens,
            generated_tokens=counters.generated_tokens,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            preemptions=counters.preemptions,
            host_waits=self._executor.rank.runner.waits.host_waits,
            finished_requests=counters.finished_requests,
            last_token_monotonic_s=self._last_token_s,
            step_seconds_sum=self._step_seconds,
        )

    def report(self) -> EngineReport:
        """Where steps went and what graphs are, as of now; a step may run meanwhile."""
        return engine_report(self._config, self._executor.rank, self._phases)

    def close(self) -> None:
        """Let running steps end and free the device."""
        self._executor.close()


def _plain_update(progress: Progress) -> RequestUpdate:
    """News of a row that has tokens or a reason to end, and nothing else."""
    request = progress.request
    return RequestUpdate(
        request_id=request.request_id,
        token_ids=list(progress.row.token_ids),
        finish_reason=request.finish_reason,
        stop_id=progress.stop_id,
        cached_tokens=request.cached_tokens,
    )


def _update(progress: Progress) -> RequestUpdate:
    """News of any row."""
    request, row = progress.request, progress.row
    return RequestUpdate(
        request_id=request.request_id,
        token_ids=list(row.token_ids),
        logprobs=[_position(entry) for entry in row.logprobs],
        prompt_logprobs=[_position(entry) for entry in row.prompt_logprobs],
        finish_reason=request.finish_reason,
        stop_id=progress.stop_id,
        cached_tokens=request.cached_tokens,
        error=row.error,
        error_kind=_fault(progress),
        error_field="response_format" if row.error and request.params.structured else "",
    )


def _fault(progress: Progress) -> str:
    """Whose fault a failed row is: a grammar is the client's, anything else is ours."""
    if not progress.row.error:
        return ""
    return "request" if progress.request.params.structured else "engine"


def _position(entry: TokenLogprobs) -> PositionLogprobs:
    return PositionLogprobs(entry.token_ids.tolist(), entry.logprobs.tolist(), entry.rank)


def _refuse(
    message: AddRequest,
    text: str,
    *,
    kind: str = "request",
    field: str = "",
    retry_after_s: float = 0.0,
) -> RequestUpdate:
    return RequestUpdate(
        request_id=message.request_id,
        finish_reason=FinishReason.ERROR,
        error=text,
        error_kind=kind,
        error_field=field,
        retry_after_s=retry_after_s,
    )
