"""What do all routes of one server share?

The config, the metrics, and the engine's client once it is there: until then every route that needs it answers 503,
while `/health/live` says that the process lives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from tokamak.config.engine import ServerConfig
from tokamak.engine.client import EngineClient
from tokamak.server.errors import NotLoadedError, UnknownModelError
from tokamak.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

Connect = Callable[[], Awaitable[EngineClient]]
"""Starts an engine and returns its client when it serves."""


@dataclass(slots=True)
class ServerState:
    """One per app, at `app.state.server`."""

    config: ServerConfig
    metrics: Metrics
    client: EngineClient | None = None
    load_failure: str | None = None
    """Why there will be no client, once that is known."""
    started_s: float = field(default_factory=time.monotonic)

    async def load(self, connect: Connect) -> None:
        """Get the client; a failure is kept for the health routes and raised."""
        try:
            self.client = await connect()
        except Exception as error:
            self.load_failure = str(error)
            raise

    def engine(self) -> EngineClient:
        """The client, or NotLoadedError."""
        if self.client is not None:
            return self.client
        if self.load_failure is not None:
            raise NotLoadedError(f"the model could not be loaded: {self.load_failure}")
        seconds = time.monotonic() - self.started_s
        raise NotLoadedError(
            f"the model is still loading, since {seconds:.0f} s", hint="ask /health/ready"
        )

    def model_name(self, asked: str | None) -> str:
        """The name to answer under; a name that is not served is UnknownModelError."""
        names = self.engine().info.served_names
        if asked is None:
            return names[0]
        if asked not in names:
            raise UnknownModelError(
                f"model {asked[:80]!r} is not served here",
                hint=f"this server has {', '.join(names)}",
            )
        return asked


def server_state(request: Request) -> ServerState:
    """The state of the app that serves a request."""
    state: ServerState = request.app.state.server
    return state
