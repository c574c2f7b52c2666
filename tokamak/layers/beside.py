"""Launches of few rows beside what their layer launches meanwhile.

Kernels of few rows wait for memory and for each other more than they compute: two chains of them that do not need each
other take hardly longer than the longer one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokamak.core.context import current

MOST_ROWS = 16
"""More rows fill a device on their own, and memory of a side stream is nobody else's."""


class Beside:
    """A side stream of the step for one part of every layer, by name; what is forked is joined between the same two regions."""

    def __init__(self, name: str) -> None:
        self._name = name

    @contextmanager
    def fork(self, rows: int) -> Iterator[None]:
        """Launch what the block launches beside what follows it, up to `join`; many rows in turn.

        What the block reads must live until then.
        """
        if rows > MOST_ROWS:
            yield
            return
        with current().streams.fork(self._name):
            yield

    def join(self, rows: int) -> None:
        """Let what follows wait for the block."""
        if rows <= MOST_ROWS:
            current().streams.join(self._name)
