"""Where does a decode step's time go? GPU time by kernel, time the GPU waits, and time of the host by span.

Wraps an engine core: after some steps in which nothing is prefilled, PyTorch's profiler watches the next ones.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tokamak.engine.core import EngineCore
from tokamak.engine.messages import AddRequest, EngineReport, EngineStats, Ready, RequestUpdate
from tokamak.telemetry.spans import SPANS

UNWATCHED_STEPS = 8
WATCHED_STEPS = 16
PREPARATION = ("stage", "publish", "fill", "attn", "install")
"""Spans of what is prepared in front of a launch."""


@dataclass(slots=True)
class Profile:
    """Microseconds a step, averaged over the watched steps."""

    steps: int
    wall_us: float
    """From the first kernel's start to the last one's end."""
    busy_us: float
    idle_us: float
    kernels: list[tuple[str, float, float]]
    """Name, launches and microseconds a step, the longest first."""
    host_us: dict[str, float]
    """Median microseconds by span."""

    def lines(self, most: int = 24) -> list[str]:
        """The profile for a person."""
        found = [
            f"  {self.steps} steps: wall {self.wall_us:.0f} us, GPU busy {self.busy_us:.0f}, idle {self.idle_us:.0f}; "
            + "host "
            + ", ".join(f"{name} {us:.0f}" for name, us in self.host_us.items() if us >= 1)
        ]
        found += [
            f"  {us:9.1f} us {count:7.1f} x  {name[:100]}"
            for name, count, us in self.kernels[:most]
        ]
        if len(self.kernels) > most:
            rest = self.kernels[most:]
            found.append(f"  {sum(us for *_, us in rest):9.1f} us in {len(rest)} other kernels")
        return found


@dataclass(slots=True)
class ProfiledCore:
    """An engine core whose steady decode steps can be watched."""

    core: EngineCore
    profile: Profile | None = None
    _wanted: bool = False
    _steady: int = 0
    _watched: int = 0
    _running: Any = field(default=None)

    def watch(self) -> None:
        """Watch the next steady steps."""
        self._wanted, self._steady, self.profile = True, 0, None

    def ready(self) -> Ready:
        return self.core.ready()

    def add(self, message: AddRequest) -> None:
        self.core.add(message)

    def abort(self, request_ids: list[str]) -> None:
        self.core.abort(request_ids)

    def reset_prefix_cache(self) -> None:
        self.core.reset_prefix_cache()

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    def work_ahead(self) -> bool:
        return self.core.work_ahead()

    def stats(self) -> EngineStats:
        return self.core.stats()

    def report(self) -> EngineReport:
        return self.core.report()

    def close(self) -> None:
        self.core.close()

    def step(self) -> list[RequestUpdate]:
        """One turn, watched if it is time."""
        before = self.core.stats()
        updates = self.core.step()
        after = self.core.stats()
        if not self._wanted:
            return updates
        each = after.scheduled_tokens - before.scheduled_tokens
        self._steady = self._steady + 1 if each == after.running_requests else 0
        if self._running is not None:
            self._watched += 1
            if self._watched == WATCHED_STEPS:
                self._end()
        elif self._steady == UNWATCHED_STEPS:
            self._begin()
        return updates

    def _begin(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(activities=kinds)
        self._running.start()
        self._watched = 0

    def _end(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._running.stop()
        spans = self.core._executor.rank.runner.spans.recent_ns()[-WATCHED_STEPS:] / 1e3
        host = {name: float(np.median(spans[:, at])) for at, name in enumerate(SPANS)}
        self.profile = read_profile(self._running, host)
        self._running, self._wanted = None, False


def read_profile(profiler: Any, host_us: dict[str, float]) -> Profile:
    """What a stopped profiler saw of the GPU."""
    events = profiler.profiler.kineto_results.events()
    of_host = {event.name() for event in events if event.device_type().name == "CPU"}
    spans: list[tuple[int, int]] = []
    counts: dict[str, int] = defaultdict(int)
    times: dict[str, int] = defaultdict(int)
    for event in events:
        # Ranges of the host are drawn over the kernels they launched, under their own names.
        if event.device_type().name != "CUDA" or event.name() in of_host:
            continue
        spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        counts[event.name()] += 1
        times[event.name()] += event.duration_ns()
    each = 1e3 * WATCHED_STEPS
    wall, busy = _covered(spans)
    kernels = [(name, counts[name] / WATCHED_STEPS, times[name] / each) for name in times]
    return Profile(
        steps=WATCHED_STEPS,
        wall_us=wall / each,
        busy_us=busy / each,
        idle_us=(wall - busy) / each,
        kernels=sorted(kernels, key=lambda kernel: -kernel[2]),
        host_us=host_us,
    )


def _covered(spans: list[tuple[int, int]]) -> tuple[int, int]:
    """From the first start to the last end, and how much of it some span covers."""
    if not spans:
        return 0, 0
    busy, first = 0, min(start for start, _ in spans)
    end = first
    for start, stop in sorted(spans):
        busy += max(0, stop - max(start, end))
        end = max(end, stop)
    return end - first, busy
