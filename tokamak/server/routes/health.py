"""Is this server alive, ready, and getting anywhere?

`live`: the process answers and the engine's loop has spoken lately; restart it if not. `ready`: the model is loaded,
the engine lives and takes new requests; send traffic only then. `progress`: while there is work, tokens come.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from tokamak.engine.client import EngineHealth
from tokamak.server.openapi import answers
from tokamak.server.state import ServerState, server_state

router = APIRouter(prefix="/health", tags=["health"])

LONGEST_LOOP_AGE_S = 60.0
"""The loop is silent for the length of a step; a step of a large model on a slow machine takes seconds."""

LONGEST_TOKEN_AGE_S = 120.0
"""With work, tokens come every step once prompts are computed."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the engine; `reason` says why the status is not 200."""

    status: str
    reason: str | None
    loaded: bool
    draining: bool = False
    loop_age_s: float | None = None
    unfinished_requests: int = 0
    token_age_s: float | None = None


@router.get("/live", responses=answers(Health, unwell=Health), response_model=None)
async def live(request: Request) -> Response:
    """200 while the process answers and the engine's loop goes on; also while the model loads."""
    state = server_state(request)
    if state.client is None:
        return _answer(state, None, "loading", state.load_failure)
    health = state.client.health()
    return _answer(state, health, "alive", _dead(health))


@router.get("", responses=answers(Health, unwell=Health), response_model=None)
@router.get("/ready", responses=answers(Health, unwell=Health), response_model=None)
async def ready(request: Request) -> Response:
    """200 while new requests are welcome."""
    state = server_state(request)
    if state.client is None:
        return _answer(state, None, "loading", state.load_failure or "the model is still loading")
    health = state.client.health()
    reason = _dead(health)
    if reason is None and not health.loaded:
        reason = "the model is still loading"
    if reason is None and health.draining:
        reason = "the server is shutting down and finishes what it has"
    return _answer(state, health, "ready", reason)


@router.get("/progress", responses=answers(Health, unwell=Health), response_model=None)
async def progress(request: Request) -> Response:
    """200 while tokens come, or there is nothing to do."""
    state = server_state(request)
    if state.client is None:
        return _answer(state, None, "loading", state.load_failure or "the model is still loading")
    health = state.client.health()
    reason = _dead(health)
    age_s = health.token_age_s
    if reason is None and age_s is not None and age_s > LONGEST_TOKEN_AGE_S:
        reason = (
            f"{health.unfinished_requests} requests wait, and no token came for {age_s:.0f} s;"
            f" the limit is {LONGEST_TOKEN_AGE_S:g} s"
        )
    status = "working" if health.unfinished_requests else "idle"
    return _answer(state, health, status, reason)


def _dead(health: EngineHealth) -> str | None:
    if not health.alive:
        return health.failure or "the engine is gone"
    if health.loop_age_s > LONGEST_LOOP_AGE_S:
        return (
            f"the engine's loop is silent for {health.loop_age_s:.0f} s;"
            f" the limit is {LONGEST_LOOP_AGE_S:g} s"
        )
    return None


def _answer(
    state: ServerState, health: EngineHealth | None, status: str, reason: str | None
) -> Response:
    if health is None:
        body = Health(
            status="failed" if state.load_failure is not None else status,
            reason=reason,
            loaded=False,
        )
    else:
        body = Health(
            status=status if reason is None else "unwell",
            reason=reason,
            loaded=health.loaded,
            draining=health.draining,
            loop_age_s=health.loop_age_s,
            unfinished_requests=health.unfinished_requests,
            token_age_s=health.token_age_s,
        )
    return Response(
        msgspec.json.encode(body),
        200 if reason is None else 503,
        headers={"Cache-Control": "no-store"} if reason is None else {"Retry-After": "1"},
        media_type="application/json",
    )
