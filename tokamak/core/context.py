"""What may the body of an eager region read? The context of the step that is running.

A custom op cannot take Python objects, so bodies of eager regions, and nothing else, read it from here. One
context is installed at a time per thread: it is built complete, installed for one forward and removed.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from tokamak.core.inputs import AttnStep, StepInputs
from tokamak.core.plan import Int32s, StepShape
from tokamak.errors import ContextNested, NoContext


class Streams(Protocol):
    """Side streams beside the compute stream; every fork is joined before the forward ends."""

    def fork(self, name: str) -> AbstractContextManager[None]:
        """Start a side stream after what was launched so far; what the `with` block launches goes there."""
        ...

    def join(self, name: str) -> None:
        """Let the compute stream wait for a side stream."""
        ...

    def check_forward_end(self) -> None:
        """Raise UnjoinedSideStream unless everything was joined."""
        ...

    def forget(self) -> None:
        """After an error: nothing is open."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """One forward: its settled shape, its inputs, and the layers whose region bodies may run."""

    shape: StepShape
    inputs: StepInputs
    attn: AttnStep
    running_table: Int32s
    """Token rows each data-parallel rank runs; a read-only view. int32 [ranks]."""
    layers: Sequence[object]
    """By the number a layer got from `Build.enroll`: what a region body finds its weights and caches in."""
    streams: Streams
    pad_value: float
    """What region bodies leave in pad rows: 0, or NaN while padding is being watched."""
    late: StepContext | None
    """Of the second forward, where late layers run on their own behind this one."""


class _Installed(threading.local):
    context: StepContext | None = None


_INSTALLED = _Installed()


@contextmanager
def installed(context: StepContext) -> Generator[StepContext]:
    """Install a context for one forward.

    Raises:
        ContextNested: another one is installed in this thread.
        UnjoinedSideStream: the forward forked a side stream and did not join it.
    """
    if _INSTALLED.context is not None:
        raise ContextNested(
            f"a step context of {_INSTALLED.context.shape.running_tokens} token rows is installed already",
            hint="a forward inside a forward needs the first one to end",
        )
    _INSTALLED.context = context
    try:
        yield context
        context.streams.check_forward_end()
    except BaseException:
        context.streams.forget()
        raise
    finally:
        _INSTALLED.context = None


def current() -> StepContext:
    """The installed context.

    Raises:
        NoContext: no forward is running in this thread.
    """
    context = _INSTALLED.context
    if context is None:
        raise NoContext(
            "an eager region ran outside of a forward", hint="install a StepContext first"
        )
    return context
