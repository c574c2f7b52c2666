"""How does a stream of events reach the client, and how does the client's leaving reach the engine?

In: an async generator of encoded events, each already one chunk. Out: a `text/event-stream` response that ends with
`data: [DONE]`, or with an `error` event if something failed under way. If the client leaves, the generator is closed
at once, which aborts what feeds it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokamak.errors import TokamakError
from tokamak.server.disconnect import unless_gone
from tokamak.server.errors import ClientGoneError, Failure, failure_of

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(body: msgspec.Struct) -> bytes:
    """One event with a JSON body."""
    return b"data: " + _encode(body) + b"\n\n"


def error_event(failure: Failure) -> bytes:
    """The event that ends a stream in which something failed."""
    return b"event: error\ndata: " + failure.body() + b"\n\n"


class EventStream(Response):
    """A response that sends each chunk of a generator as it comes."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes], request_id: str) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, or as much of it as the client stays for."""
        try:
            await unless_gone(receive, self._send(send))
        except ClientGoneError:
            logger.debug("request %s: the client left its stream", self._request_id)

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": True})
        except Exception as error:
            if isinstance(error, TokamakError):
                logger.warning("request %s: its stream ended with %s", self._request_id, error)
            else:
                logger.exception("request %s: its stream failed", self._request_id)
            chunk = error_event(failure_of(error))
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            await self._chunks.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
