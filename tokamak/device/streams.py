"""Where work runs beside the host: a queue of jobs, one after the other, and a handle to wait on.

On a CPU a stream is one thread; all tensor work of a rank runs on it, so that PyTorch keeps one team of
worker threads and the host can plan the next step meanwhile. A GPU has streams of its own: its jobs are launched
by the thread that has them, which goes on while they run.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Stream(Protocol):
    """Runs jobs in the order they were submitted."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Take a job; its result or exception is in the future."""
        ...

    def close(self) -> None:
        """Let what was submitted end."""
        ...


class CallerStream:
    """Runs each job in the thread that submits it: what a job launches on a GPU runs on after it."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run a job; its result or exception is in the future."""
        future: Future[T] = Future()
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Nothing of the host's is left to end."""


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
