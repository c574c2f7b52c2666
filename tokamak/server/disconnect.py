"""Has the client left while we work for it?

A request's `receive`, once its body is read, speaks only when the client leaves. Whoever works on an answer waits
for both; if the client is first, the work is cancelled and has ended before this returns, so that closing its
generators has aborted what ran.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from tokamak.server.errors import ClientGoneError

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, unless the client leaves first.

    Raises:
        ClientGoneError: the client left; the work was cancelled and has ended.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
            raise ClientGoneError("the client closed its connection")
        return working.result()
    finally:
        await ended(watching)
        await ended(working)


async def ended(task: asyncio.Future[Any]) -> None:
    """Cancel a task if it still runs, and wait for its end."""
    task.cancel()
    await asyncio.wait((task,))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
