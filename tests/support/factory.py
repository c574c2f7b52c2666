"""Valid requests, plans, schedulers and rows for tests, made of the real classes."""

from __future__ import annotations

from collections.abc import Iterable

from tokamak.cache.groups import CacheGroup, group_sub_caches
from tokamak.cache.holdings import Holdings
from tokamak.cache.sub_cache import SubCache
from tokamak.config.engine import SchedulerConfig
from tokamak.core.plan import RowResult, StepPlan, StepResult
from tokamak.core.request import Request, SamplingParams
from tokamak.engine.scheduler import Progress, Scheduler

END_ID = 2
"""The token that ends a generation in these tests."""


def cache_groups() -> tuple[CacheGroup, ...]:
    """One group with keys and values of a two-layer model."""
    return group_sub_caches(
        [
            SubCache("keys", (0, 1), heads=2, width=8, dtype="float32"),
            SubCache("values", (0, 1), heads=2, width=8, dtype="float32"),
        ]
    )


def some_holdings(*, blocks: int = 65, block_tokens: int = 4, reuse: bool = True) -> Holdings:
    """An account of `blocks - 1` usable blocks."""
    return Holdings(cache_groups(), block_tokens=block_tokens, blocks=[blocks], reuse=reuse)


def a_scheduler(
    *,
    step_tokens: int = 64,
    requests: int = 8,
    blocks: int = 65,
    block_tokens: int = 4,
    reuse: bool = True,
    policy: str = "fcfs",
    max_model_len: int = 1024,
) -> Scheduler:
    """A scheduler over its own blocks."""
    config = SchedulerConfig(
        max_num_seqs=requests,
        max_num_batched_tokens=step_tokens,
        policy=policy,  # type: ignore[arg-type]
        max_waiting_requests=1000,
        max_waiting_tokens=10**6,
    )
    holdings = some_holdings(blocks=blocks, block_tokens=block_tokens, reuse=reuse)
    return Scheduler(config, holdings, max_model_len)


def a_request(
    name: str = "r",
    *,
    prompt: int | Iterable[int] = 4,
    max_tokens: int = 8,
    priority: int = 0,
    salt: str = "",
    params: SamplingParams | None = None,
) -> Request:
    """A request; `prompt` is a length (ids 100, 101, …) or the ids."""
    ids = list(range(100, 100 + prompt)) if isinstance(prompt, int) else list(prompt)
    return Request(
        request_id=name,
        prompt_ids=ids,
        params=params or SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        stop_ids=frozenset({END_ID}),
        priority=priority,
        cache_salt=salt,
    )


def a_result(plan: StepPlan, token_id: int = 7, **by_request: int) -> StepResult:
    """The result of a plan in which every sampled row got `token_id`, or its own of `by_request`."""
    sampled = set(plan.sampled_rows.tolist())
    rows = [
        RowResult(
            request_id=name,
            token_ids=(by_request.get(name, token_id),) if row in sampled else (),
            logprobs=(),
            prompt_logprobs=(),
            complete=False,
            error="",
        )
        for row, name in enumerate(plan.request_ids)
    ]
    return StepResult(seq=plan.seq, rows=tuple(rows))


def scheduled(plan: StepPlan | None) -> dict[str, int]:
    """Tokens of each request in a plan."""
    if plan is None:
        return {}
    return dict(zip(plan.request_ids, plan.query_lens.tolist(), strict=True))


def run_step(scheduler: Scheduler, token_id: int = 7, **by_request: int) -> list[Progress]:
    """Plan one step and commit it at once."""
    plan = scheduler.plan()
    assert plan is not None, "nothing to plan"
    return scheduler.commit(a_result(plan, token_id, **by_request))
