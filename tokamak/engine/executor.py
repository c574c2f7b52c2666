"""The port to runners: where a plan goes, and where its result comes from.

In process: one rank beside the engine, so that the engine plans the next step while this one runs. On a CPU the
rank has a thread of its own; on a GPU the engine's thread launches its steps, which run there by themselves.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Protocol

import torch

from tokamak.config.engine import EngineConfig
from tokamak.core.plan import StepPlan, StepResult
from tokamak.device.streams import CallerStream, CpuStream, Stream
from tokamak.device.waits import HostWaits
from tokamak.errors import FatalError
from tokamak.runner.ahead import CompileAhead
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

    def work_ahead(self) -> bool:
        """Record a step size that was put off, between steps; whether there are more."""
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


class _LaunchedStep:
    """A step on a GPU: launched, or failed on the host."""

    def __init__(self, plan: StepPlan, launched: Future[InFlightResult | None]) -> None:
        self.plan = plan
        self._launched = launched

    def take(self) -> StepResult:
        """Wait for the step's tokens, which is counted where they arrive; raises what the step raised.

        Raises:
            FatalError: the GPU failed. Whatever it is asked from then on fails too.
        """
        try:
            result = self._launched.result()
            assert result is not None, f"step {self.plan.seq} had no rows"
            return result.take()
        except torch.AcceleratorError as error:
            raise FatalError(
                f"the GPU failed in step {self.plan.seq} or the one launched after it: "
                f"{str(error).splitlines()[0]}",
                hint="start the engine again; CUDA_LAUNCH_BLOCKING=1 finds the kernel",
            ) from error


class InProcessExecutor:
    """One rank in this process. ahead: kernels that are compiled for it already; None begins to."""

    def __init__(self, config: EngineConfig, *, ahead: CompileAhead | None = None) -> None:
        threads = config.kernels.threads
        self._on_cpu = config.model.device == "cpu"
        self._stream: Stream = CallerStream()
        if self._on_cpu:
            self._stream = CpuStream("tokamak-rank", partial(torch.set_num_threads, threads))
        try:
            self.rank = self._stream.submit(partial(assemble, config, ahead=ahead)).result()
        except BaseException:
            self._stream.close()
            raise

    def launch(self, plan: StepPlan) -> InFlight:
        """Start a step and return at once."""
        runner = self.rank.runner
        launched = self._stream.submit(partial(runner.step, plan))
        if self._on_cpu:
            return _StreamStep(plan, launched, runner.waits)
        return _LaunchedStep(plan, launched)

    def work_ahead(self) -> bool:
        """Record a step size that was put off, and wait for it; whether there are more."""
        recorder = self.rank.runner.recorder
        return recorder.is_alone and self._stream.submit(recorder.record_next).result()

    def close(self) -> None:
        """Let running steps end and stop the thread; what runs on a GPU ends by itself."""
        self._stream.close()
