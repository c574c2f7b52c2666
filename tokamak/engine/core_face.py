"""What may a front end ask of an engine core?

`EngineCore` has this face, and so has the scripted core of the tests. One thread calls it.
"""

from __future__ import annotations

from typing import Protocol

from tokamak.engine.messages import AddRequest, EngineReport, EngineStats, Ready, RequestUpdate


class CoreFace(Protocol):
    """A loaded engine that is turned step by step."""

    def ready(self) -> Ready:
        """What it settled on while loading."""
        ...

    def add(self, message: AddRequest, /) -> None:
        """Queue a request; a refusal comes out of the next step."""
        ...

    def abort(self, request_ids: list[str], /) -> None:
        """Forget these requests; no update follows."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget reusable blocks that no request holds."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        ...

    def step(self) -> list[RequestUpdate]:
        """One turn of the loop; its news may be none."""
        ...

    def work_ahead(self) -> bool:
        """Do a piece of what can wait for a quiet moment, such as a recording; whether there is more."""
        ...

    def stats(self) -> EngineStats:
        """Gauges and counters now."""
        ...

    def report(self) -> EngineReport:
        """Where steps went and what graphs are, now."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...
