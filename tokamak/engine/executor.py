"""The port to runners: where a plan goes, and where its result comes from.

In process: one rank on a stream of its own, so the engine plans the next step while this one runs.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Protocol

import torch

from tokamak.config.engine import EngineConfig
from tokamak.core.plan import StepPlan, StepResult
from tokamak.device.streams import CpuStream
from tokamak.device.waits import HostWaits
from tokamak.runner.assemble import Rank, assemble
from tokamak.runner.results import InFlightResult


class InFlight(Protocol):
    """A launched step."""

    plan: StepPlan

    def take(self) -> StepResult:
        """Wait for the step; raises what the step raised."""
        ...


class Executor(Protocol):
    """Runs plans in the order they are launched."""

    rank: Rank

    def launch(self, plan: StepPlan) -> InFlight:
        """Start a step and return at once."""
        ...

    def close(self) -> None:
        """Let running steps end and free the device."""
        ...


class _StreamStep:
    """A step on a CPU stream."""

    def __init__(
        self, plan: StepPlan, future: Future[InFlightResult | None], waits: HostWaits
    ) -> None:
        self.plan = plan
        self._future = future
        self._waits = waits

    def take(self) -> StepResult:
        """Wait for the step; raises what the step raised."""
        result = self._waits.wait(self._future.result)
        assert result is not None, f"step {self.plan.seq} had no rows"
        return result.take()


class InProcessExecutor:
    """One rank in this process."""

    def __init__(self, config: EngineConfig) -> None:
        threads = config.kernels.threads
        self._stream = CpuStream("tokamak-rank", partial(torch.set_num_threads, threads))
        try:
            self.rank = self._stream.submit(partial(assemble, config)).result()
        except BaseException:
            self._stream.close()
            raise

    def launch(self, plan: StepPlan) -> InFlight:
        """Start a step and return at once."""
        runner = self.rank.runner
        return _StreamStep(plan, self._stream.submit(partial(runner.step, plan)), runner.waits)

    def close(self) -> None:
        """Let running steps end and stop the thread."""
        self._stream.close()
