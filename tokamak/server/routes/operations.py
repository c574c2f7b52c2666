"""What do operators ask a server for: its numbers, its version, an empty prefix cache?"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from tokamak import __version__
from tokamak.server.openapi import answers
from tokamak.server.state import server_state
from tokamak.telemetry.metrics import CONTENT_TYPE

router = APIRouter(tags=["operations"])


class Version(msgspec.Struct, frozen=True):
    """The version of this server."""

    version: str


class CacheReset(msgspec.Struct, frozen=True):
    """The order was given; blocks that running requests hold stay."""

    reset: bool


@router.get(
    "/metrics",
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    response_model=None,
    response_class=Response,
)
async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    return Response(server_state(request).metrics.text(), media_type=CONTENT_TYPE)


@router.get("/version", responses=answers(Version, body=False), response_model=None)
async def version() -> Response:
    """The version of this server."""
    return Response(msgspec.json.encode(Version(__version__)), media_type="application/json")


@router.post("/reset_prefix_cache", responses=answers(CacheReset, body=False), response_model=None)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget prompts' prefixes that no running request holds."""
    await server_state(request).engine().reset_prefix_cache()
    return Response(msgspec.json.encode(CacheReset(True)), media_type="application/json")
