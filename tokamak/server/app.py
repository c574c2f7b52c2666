"""How does an engine's client become an HTTP server?

In: a client, or a way to get one. Out: an ASGI app with every route, in which errors become HTTP statuses. From the
outside in, a request passes: its id and the last resort (`edge`), cross-origin rules, API keys, the body's limit,
the routes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from tokamak import __version__
from tokamak.config.engine import ServerConfig
from tokamak.engine.client import EngineClient
from tokamak.errors import OverloadedError, TokamakError
from tokamak.server.auth import ApiKeys
from tokamak.server.body import BodyLimit
from tokamak.server.edge import Edge
from tokamak.server.errors import INVALID, Failure, NotLoadedError, failure_of
from tokamak.server.openapi import describe
from tokamak.server.protocol.answers import ErrorBody, ErrorDetail
from tokamak.server.protocol.chat import ChatChunk, ChatCompletion, ChatRequest
from tokamak.server.protocol.completions import Completion, CompletionRequest
from tokamak.server.protocol.tokenize import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)
from tokamak.server.routes import chat, completions, health, models, operations, tokenize
from tokamak.server.state import Connect, ServerState
from tokamak.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

ROUTERS = (
    chat.router,
    completions.router,
    models.router,
    tokenize.router,
    health.router,
    operations.router,
)

BODIES = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]

ANSWERS: list[type[msgspec.Struct]] = [
    ChatCompletion,
    ChatChunk,
    Completion,
    Tokenized,
    Detokenized,
    models.ModelList,
    models.ModelCard,
    health.Health,
    operations.Version,
    operations.CacheReset,
    operations.Graphs,
    ErrorBody,
]


def create_app(client_or_connect: EngineClient | Connect, config: ServerConfig) -> FastAPI:
    """An app over an engine.

    Args:
        client_or_connect: a client that serves, which stays the caller's to close; or a coroutine
            function that starts an engine and returns its client. It runs when the app starts: until it
            returns, routes that need the engine answer 503 and `/health/live` 200. If it raises, the
            error is logged and kept in `app.state.server.load_failure`. The app closes the client it got.
        config: what to accept; host and port are the caller's affair.
    """
    state = ServerState(config=config, metrics=Metrics())
    connect: Connect | None = None
    if isinstance(client_or_connect, EngineClient):
        state.client = client_or_connect
    else:
        connect = client_or_connect
    state.metrics.watch_engine(lambda: _engine_numbers(state))
    state.metrics.watch_steps(lambda: _step_numbers(state))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        if connect is None:
            yield
            return
        loading = asyncio.create_task(_load(state, connect))
        try:
            yield
        finally:
            loading.cancel()
            await asyncio.wait((loading,))
            if state.client is not None:
                await state.client.close()

    app = FastAPI(
        title="Tokamak",
        version=__version__,
        description="Open models behind the OpenAI API.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.server = state
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(TokamakError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_middleware(BodyLimit, max_body_bytes=config.max_body_bytes)
    if config.api_keys:
        app.add_middleware(ApiKeys, keys=config.api_keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Edge, metrics=state.metrics)
    _describe_once(app)
    return app


async def _load(state: ServerState, connect: Connect) -> None:
    try:
        await state.load(connect)
    except TokamakError as error:
        logger.critical("the model could not be loaded: %s", error)
    except Exception:
        logger.exception("the model could not be loaded")


def _engine_numbers(state: ServerState) -> Mapping[str, float] | None:
    return None if state.client is None else msgspec.structs.asdict(state.client.stats())


def _step_numbers(state: ServerState) -> Mapping[str, Any] | None:
    return None if state.client is None else msgspec.to_builtins(state.client.report())


async def _answer_error(request: Request, error: Exception) -> Response:
    failure = failure_of(error)
    # Under overload every refusal would be a line; the metrics count them.
    expected = failure.status < 500 or isinstance(error, OverloadedError | NotLoadedError)
    level = logging.DEBUG if expected else logging.WARNING
    logger.log(level, "request %s: %d: %s", request.state.request_id, failure.status, error)
    return failure.response()


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """The routing's own errors, in our words: no such path, or not this method."""
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path[:200]}"
    match error.status_code:
        case 404:
            message, code = (
                f"{place} is no route of this server (hint: see /openapi.json)",
                "not_found",
            )
        case 405:
            message, code = f"{place} is not allowed here", "method_not_allowed"
        case _:
            message, code = str(error.detail), "http_error"
    detail = ErrorDetail(message, INVALID, None, code)
    return Failure(error.status_code, detail, dict(error.headers or {})).response()


def _describe_once(app: FastAPI) -> None:
    """Let `/openapi.json` hold our bodies and answers; it is made when first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app, list(BODIES), ANSWERS)
        return app.openapi_schema

    app.openapi = openapi
