"""Who listens to kernel calls? While a recording is made, what ran is noted here."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from typing import Protocol

Integers = ctypes.Array[ctypes.c_int64]

JOB_WORDS = 4
"""Integers of a job to replay: work, arguments, threads, and the place of the item counter among them."""


class Replayer(Protocol):
    """What runs jobs again."""

    def replay(self, jobs: Integers) -> None:
        """Run jobs in order: JOB_WORDS integers each."""
        ...


@dataclass(slots=True)
class Job:
    """One kernel call that was made."""

    work: int
    arguments: Integers
    """Its integers, and the item counter behind them."""
    threads: int
    replayer: Replayer


@dataclass(slots=True)
class Calls:
    """Kernel calls while someone listens."""

    jobs: list[Job] = field(default_factory=list[Job])


class _Listening(threading.local):
    calls: Calls | None = None


LISTENING = _Listening()
"""Who listens to the kernel calls of this thread."""
