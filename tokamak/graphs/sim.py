"""How is a segment recorded on a CPU? Every op is logged with its memory, and replayed into that memory.

The twin of a CUDA graph: addresses and Python numbers are frozen, memory comes from a private pool and is
reused, and reading a number back to the host is an error. Ops of PyTorch are seen by a dispatch mode.
Calls of compiled kernels are not PyTorch ops; they are listened to, and consecutive ones replay as one
native call. Code that a native compiler made out of PyTorch ops would be seen by neither.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tokamak.errors import GraphError, HostReadInRecording
from tokamak.graphs.pool import CHUNK_BYTES, BytePool
from tokamak.graphs.region import REGIONS
from tokamak.ops.jit.calls import JOB_WORDS, LISTENING, Calls, Job, Replayer

ALLOCATING = ("aten::empty", "aten::new_empty")
"""Ops that make memory and compute nothing."""
Op = Any
"""A torch.OpOverload; its type has no public home."""


class _NoTensors(list[Tensor]):
    """Keeps nothing: a listed tensor would hold its memory for the whole segment."""

    def append(self, object: Tensor, /) -> None:
        """Drop it."""


@dataclass(slots=True)
class SimSegment:
    """What a segment did: calls that repeat it, in order."""

    steps: tuple[Callable[[], object], ...]
    kernel_runs: int
    """Native calls; each repeats consecutive kernel jobs."""
    op_count: int
    """PyTorch ops that are repeated one by one from Python."""
    kept: tuple[object, ...]
    """What the steps hold addresses of."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to replay."""
        return not self.steps


@dataclass(slots=True)
class _Log:
    """A segment while it is recorded."""

    pool: BytePool
    calls: Calls = field(default_factory=Calls)
    steps: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    kept: list[object] = field(default_factory=list[object])
    kernel_runs: int = 0
    op_count: int = 0

    def add(self, step: Callable[[], object]) -> None:
        """Log an op, behind the kernels that ran before it."""
        self.flush()
        self.steps.append(step)
        self.op_count += 1

    def flush(self) -> None:
        """Make one native call of the kernel jobs since the last op."""
        jobs = list(self.calls.jobs)
        self.calls.jobs.clear()
        begin = 0
        for end in range(1, len(jobs) + 1):
            replayer = jobs[begin].replayer
            if end == len(jobs) or jobs[end].replayer is not replayer:
                self._add_run(replayer, jobs[begin:end])
                begin = end

    def _add_run(self, replayer: Replayer, jobs: list[Job]) -> None:
        words = (ctypes.c_int64 * (JOB_WORDS * len(jobs)))()
        for at, job in enumerate(jobs):
            words[JOB_WORDS * at : JOB_WORDS * (at + 1)] = (
                job.work,
                ctypes.addressof(job.arguments),
                job.threads,
                len(job.arguments) - 1,
            )
        self.steps.append(partial(replayer.replay, words))
        self.kept.extend(jobs)
        self.kernel_runs += 1

    def alias(self, value: Any) -> Any:
        """An argument as the log keeps it: tensors of the pool without a hold on their memory."""
        if isinstance(value, Tensor):
            alias = self.pool.alias(value)
            return value if alias is None else alias
        if isinstance(value, list | tuple):
            return type(value)(self.alias(item) for item in value)
        return value

    def home(self, made: Tensor) -> Tensor:
        """A new tensor of the pool laid out like `made`; `made` itself if it has no numbers."""
        if made.numel() == 0:
            return made
        return self.pool.tensor(tuple(made.shape), made.stride(), made.dtype)


class SimBackend:
    """Records and replays segments on a CPU; one private pool."""

    def __init__(self, device: torch.device, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        if device.type != "cpu":
            raise GraphError(
                f"the sim back end records on a CPU, not on {device}",
                hint="use graphs.backend=cuda",
            )
        self._pool = BytePool(chunk_bytes)
        self._mode = _Witness()
        self._heard_before: Calls | None = None

    def begin_segment(self) -> None:
        """Log what this thread computes from now on."""
        assert self._mode.log is None, "a segment is being recorded already"
        log = _Log(self._pool)
        self._mode.log = log
        self._heard_before = LISTENING.calls
        LISTENING.calls = log.calls
        self._mode.__enter__()

    def end_segment(self) -> SimSegment:
        """The segment; its numbers have been computed."""
        log = self._stop()
        assert log is not None, "no segment is being recorded"
        log.flush()
        return SimSegment(tuple(log.steps), log.kernel_runs, log.op_count, tuple(log.kept))

    def abort_segment(self) -> None:
        """Give up the segment that is being recorded, if any."""
        self._stop()

    def capturing(self) -> bool:
        """Whether a segment is being recorded."""
        return self._mode.log is not None

    def replay(self, segment: SimSegment) -> None:
        """Run a segment again, in its own memory."""
        if segment.op_count and not torch.is_inference_mode_enabled():
            # Outside of it, tensors that were made in inference mode cannot be refilled.
            with torch.inference_mode():
                self.replay(segment)
            return
        for step in segment.steps:
            step()

    def pool_bytes(self) -> int:
        """Bytes the pool has taken from the system."""
        return self._pool.reserved_bytes

    def detached(self, tensor: Tensor) -> Tensor:
        """A pool tensor without a hold on its memory; any other tensor itself."""
        alias = self._pool.alias(tensor)
        return tensor if alias is None else alias

    def poison(self) -> None:
        """Fill the pool's free memory with NaN."""
        self._pool.poison()

    def meaning_of(self, error: Exception) -> Exception:
        """The error itself: the log raises errors that say what they mean."""
        return error

    def _stop(self) -> _Log | None:
        log, self._mode.log = self._mode.log, None
        if log is not None:
            self._mode.__exit__(None, None, None)
            LISTENING.calls = self._heard_before
        return log


class _Witness(TorchDispatchMode):
    """Sees every PyTorch op of a segment, and moves what it makes into the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.log: _Log | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; guarding against that would import the compiler, three seconds."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A tracer's own ops are no work of the segment."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Run an op and log it; the mode is off in here, unless it is entered again."""
        kwargs = kwargs or {}
        region = REGIONS.get(func)
        if region is not None:
            # What is met may end this segment and begin the next, or run a body that is logged.
            with self:
                region.meet(args)
            return None
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        log = self.log
        assert log is not None
        _refuse_host_reads(func, args, kwargs)
        result = func(*args, **kwargs)
        return _log_op(log, func, args, kwargs, result)


def _log_op(log: _Log, func: Op, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Log what an op computed; returns its result with new tensors moved into the pool."""
    name: str = func._schema.name
    if name.startswith(ALLOCATING):
        return log.home(result)
    given = {
        t.untyped_storage()._cdata for t in _tensors((args, kwargs)) if torch._C._has_storage(t)
    }
    results = list(result) if isinstance(result, list | tuple) else [result]
    made = {
        at: log.home(item)
        for at, item in enumerate(results)
        if isinstance(item, Tensor) and item.untyped_storage()._cdata not in given
    }
    if not made and not _mutates(func):
        # A view, or a constant the host made; a kernel may have its address only.
        if name.startswith("aten::lift"):
            log.kept.append(result)
        return result
    for at, home in made.items():
        home.copy_(results[at])
        results[at] = home
    call = partial(func, *log.alias(args), **{key: log.alias(kwargs[key]) for key in kwargs})
    homes = {at: log.alias(home) for at, home in made.items()}
    if not homes:
        log.add(call)
    elif isinstance(result, Tensor):
        log.add(partial(_refill, homes[0], call))
    else:
        log.add(partial(_refill_each, homes, call))
    return type(result)(results) if isinstance(result, list | tuple) else results[0]


def _refill(home: Tensor, call: Callable[[], Tensor]) -> None:
    home.copy_(call())


def _refill_each(homes: dict[int, Tensor], call: Callable[[], Any]) -> None:
    made = call()
    for at, home in homes.items():
        home.copy_(made[at])


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _refuse_host_reads(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse ops whose result or shape depends on numbers only the device has."""
    tags = func.tags
    name: str = func._schema.name
    if torch.Tag.dynamic_output_shape in tags:
        if name == "aten::index":
            masks = (torch.bool, torch.uint8)
            host_read = any(index.dtype in masks for index in _tensors(list(args[1])))
        else:
            host_read = name != "aten::repeat_interleave" or kwargs.get("output_size") is None
    else:
        host_read = torch.Tag.data_dependent_output in tags
    if host_read:
        raise HostReadInRecording(
            f"{name} was called in a recorded segment, and a replay would not look at its numbers again",
            hint="do it in an eager region, or compute with tensors of a fixed shape",
        )


@lru_cache(maxsize=1024)
def _is_composite(func: Op) -> bool:
    """Whether an op is defined by other ops; in inference mode such ops arrive here whole."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@lru_cache(maxsize=1024)
def _mutates(func: Op) -> bool:
    """Whether an op writes into an argument."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
