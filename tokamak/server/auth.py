"""May this caller use this server?

With API keys set, every path but the open ones wants `Authorization: Bearer <key>`. Health, metrics and the
version stay open: probes and scrapers hold no keys, and they tell nothing of what was asked or answered.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tokamak.server.errors import AuthenticationError, failure_of

OPEN_PATHS = ("/health", "/metrics", "/version")
"""These and what lies below them need no key."""


class ApiKeys:
    """Lets requests with one of the keys through; the others get 401."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if (
            scope["type"] != "http"
            or self._open(scope["path"])
            or self._known(Headers(scope=scope))
        ):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError(
            "the request has no valid API key", hint="send the header Authorization: Bearer <key>"
        )
        await failure_of(error).response()(scope, receive, send)

    def _open(self, path: str) -> bool:
        return any(path == place or path.startswith(place + "/") for place in OPEN_PATHS)

    def _known(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        given = key.strip().encode("latin-1")
        # All keys are compared, each in constant time: how long it takes tells nothing.
        return sum(hmac.compare_digest(given, known) for known in self._keys) > 0
