"""The servers that tests share: each file's is started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.live_server import LiveServer, serving


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A server whose model says the alphabet, from a letter that depends on the prompt."""
    with serving() as live:
        yield live
