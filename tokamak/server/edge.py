"""What happens to every request at the outermost edge?

It gets an id, which its response carries as X-Request-Id and every log line of it names; it is counted and timed;
and an exception nobody expected becomes a 500 with a JSON body, logged with that id.
"""

from __future__ import annotations

import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokamak.server.errors import CLIENT_CLOSED_REQUEST, ClientGoneError, failure_of
from tokamak.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

LONGEST_ID = 128


class Edge:
    """Ids, counts and the last resort."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; nothing escapes from here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id
        started_s = time.monotonic()
        status = 0

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, marked)
        except ClientGoneError:
            status = CLIENT_CLOSED_REQUEST
        except Exception as error:
            logger.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if status:
                # The head is out, so all we can still do is to end the connection.
                raise
            failure = failure_of(error)
            await failure.response()(scope, receive, marked)
        finally:
            seconds = time.monotonic() - started_s
            self._metrics.http_done(_route(scope), scope["method"], status, seconds)
            logger.debug(
                "request %s: %s %s answered %d in %.3f s",
                request_id,
                scope["method"],
                scope["path"],
                status,
                seconds,
            )


def _request_id(headers: Headers) -> str:
    """The client's id if it can stand in a header and a log line, else a new one."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= LONGEST_ID and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def _route(scope: Scope) -> str:
    """The route's pattern, so that paths of clients' making do not become metrics."""
    route = scope.get("route")
    return getattr(route, "path", "unknown")
