"""What do operators ask a server for: its numbers, its version, its graphs, an empty prefix cache?"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from tokamak import __version__
from tokamak.engine.messages import GraphReport, VerdictReport
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


class Graphs(msgspec.Struct, frozen=True, kw_only=True):
    """What is recorded, when and why; and how it was checked."""

    when: str
    """`startup`, `serving`, `on-demand` or `off`."""
    why: str
    backend: str
    graphs: list[GraphReport]
    pool_bytes: int
    """Of all graphs together."""
    reserve_bytes: int
    """Set aside for them."""
    cost: str
    """Where the reserve came from: `measured`, `saved` or `default`."""
    verdicts: list[VerdictReport]
    """Of the verification at start."""
    checks: int
    """Replayed steps that were compared with the eager forward while serving."""
    check_failures: int


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


@router.get("/debug/graphs", responses=answers(Graphs, body=False), response_model=None)
async def graphs(request: Request) -> Response:
    """What is recorded: buckets, seconds, memory, segments, and what verification found. Up to a second old."""
    report = server_state(request).engine().report()
    told = Graphs(
        when=report.graphs_when,
        why=report.graphs_why,
        backend=report.graph_backend,
        graphs=report.graphs,
        pool_bytes=sum(graph.pool_bytes for graph in report.graphs),
        reserve_bytes=report.graph_reserve_bytes,
        cost=report.graph_cost,
        verdicts=report.verdicts,
        checks=report.graph_checks,
        check_failures=report.graph_check_failures,
    )
    return Response(msgspec.json.encode(told), media_type="application/json")
