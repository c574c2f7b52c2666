"""Where work runs beside the host: a queue of jobs, one after the other, and a handle to wait on.

On a CPU a stream is one thread; all tensor work of a rank runs on it, so that PyTorch keeps one team of
worker threads and the host can plan the next step meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class CpuStream:
    """One thread that runs jobs in the order they were submitted."""

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=prepare)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; its result or exception is in the future."""
        return self._pool.submit(job)

    def close(self) -> None:
        """Run what is queued, then end the thread."""
        self._pool.shutdown(wait=True)
