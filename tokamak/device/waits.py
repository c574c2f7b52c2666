"""Where may the host wait for the device? Here alone, so that it can be counted: once a step, no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class HostWaits:
    """The one helper that waits. Any thread may call it."""

    def __init__(self) -> None:
        self.host_waits = 0
        """Waits begun so far."""
        self._lock = threading.Lock()

    def wait(self, blocking: Callable[[], T]) -> T:
        """Count a wait and do it; raises what the waiting raises."""
        with self._lock:
            self.host_waits += 1
        return blocking()
