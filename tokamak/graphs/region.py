"""What runs live between recorded segments? Eager regions: registered ops, met by whoever records.

Recording and replay rest on three promises:

1. A recorded segment reads its inputs where they were at recording, so every step refills those buffers.
2. All segments of all buckets of one graph object allocate from one pool, on one capture stream.
3. A region hands its result over in memory of the segments around it (its `outs`), never in tensors of
   its own, and side streams that a segment forks are joined before that segment ends.

A region is an operator because a compiled caller is traced: the tracer walks through a plain wrapper, and
the break would vanish. An operator is opaque to it.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.library import Library, infer_schema

from tokamak.core.context import StepContext
from tokamak.errors import GraphError, HandoffShape, RegionMismatch

_LIBRARY = Library("tokamak", "FRAGMENT")
REGIONS: dict[object, EagerRegion] = {}
"""Every region by its op, for back ends that see ops go by."""


class Recorder(Protocol):
    """Who is told of the regions that a forward meets."""

    def meet(self, region: EagerRegion, args: tuple[Any, ...]) -> None:
        """Run a region as the recording wants it."""
        ...


class _Recording(threading.local):
    recorder: Recorder | None = None


RECORDING = _Recording()
"""The recorder of this thread, or None."""


class EagerRegion:
    """A piece of a forward that a token graph runs live, with the step's context installed."""

    def __init__(
        self, name: str, outs: tuple[str, ...], body: Callable[..., None], *, always_eager: bool
    ) -> None:
        self.name = name
        self.outs = outs
        self.body = body
        self.always_eager = always_eager
        parameters = _checked_parameters(name, outs, body)
        self._outs_at = tuple(parameters.index(out) for out in outs)
        _LIBRARY.define(name + infer_schema(body, mutates_args=outs))
        _LIBRARY.impl(name, self._called, "CompositeExplicitAutograd")
        _LIBRARY._register_fake(name, _compute_nothing)
        self._op: Callable[..., None] = getattr(torch.ops.tokamak, name).default
        REGIONS[self._op] = self

    def __call__(self, *args: Any) -> None:
        """Run, or be recorded: always through the op."""
        self._op(*args)

    def run(self, args: tuple[Any, ...]) -> None:
        """Run the body live beside recorded segments.

        Raises:
            HandoffShape: the body resized an out or gave it other memory, which no segment would see.
        """
        outs: list[Tensor] = [args[at] for at in self._outs_at]
        before = [_where(out) for out in outs]
        self.body(*args)
        for name, out, was in zip(self.outs, outs, before, strict=True):
            if _where(out) != was:
                raise HandoffShape(
                    f"region {self.name!r} handed back {name!r} as {_describe(out)}, and got it as "
                    f"shape {list(was[1])} at {was[0]:#x}",
                    hint="write into the tensor that was handed in; recorded segments know no other",
                )

    def meet(self, args: tuple[Any, ...]) -> None:
        """What the op does: the body, or what the recorder of this thread makes of it."""
        recorder = RECORDING.recorder
        if recorder is None:
            self.body(*args)
        else:
            recorder.meet(self, args)

    def _called(self, *args: Any) -> None:
        self.meet(args)


def eager_region(
    name: str, *, outs: tuple[str, ...] = ("out",), always_eager: bool = False
) -> Callable[[Callable[..., None]], EagerRegion]:
    """Make a module-level function the op `tokamak::<name>`, a break of token graphs.

    The function takes tensors, and numbers or strings that are frozen when recorded; what varies from step
    to step it reads from the installed context. It writes into the parameters named in `outs` and returns
    None. `always_eager` makes it a break of request graphs too.

    Raises:
        GraphError: the function is a method or nested, returns something, lacks an out, or the name is taken.
    """

    def declare(body: Callable[..., None]) -> EagerRegion:
        return EagerRegion(name, outs, body, always_eager=always_eager)

    return declare


def _checked_parameters(name: str, outs: Sequence[str], body: Callable[..., None]) -> list[str]:
    """The body's parameter names, if it can be a region."""
    qualname = body.__qualname__
    if "." in qualname:
        raise GraphError(
            f"eager region {name!r} is made of {qualname}, a method or a nested function",
            hint="declare it at the top of a module; layers are found by number in the step's context",
        )
    signature = inspect.signature(body)
    if signature.return_annotation not in (None, "None"):
        raise GraphError(
            f"eager region {name!r} returns {signature.return_annotation!r}; the next segment would not see it",
            hint="annotate `-> None` and write into a tensor named in `outs`",
        )
    parameters = list(signature.parameters)
    for out in outs:
        if out not in parameters:
            raise GraphError(
                f"eager region {name!r} has no parameter {out!r}, named in its outs",
                hint=f"it has {', '.join(parameters) or 'none'}",
            )
    if any(region.name == name for region in REGIONS.values()):
        raise GraphError(
            f"there is an eager region {name!r} already", hint="give this one another name"
        )
    return parameters


def _compute_nothing(*args: Any) -> None:
    """What tracers run in place of a body: its outs keep their shapes."""


def _where(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _describe(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)} at {tensor.data_ptr():#x}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The regions a forward calls, in order, as its model declares them."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, *declared: str | tuple[str, int]) -> Manifest:
        """Names, or (name, how many times in a row)."""
        names: list[str] = []
        for entry in declared:
            name, count = (entry, 1) if isinstance(entry, str) else entry
            names.extend([name] * count)
        return cls(tuple(names))

    def compare(self, met: Sequence[str], *, graph: str) -> None:
        """Check what was met while recording `graph`.

        Raises:
            RegionMismatch: another sequence; the message names the first difference.
        """
        met = tuple(met)
        if met == self.names:
            return
        at = next(
            (at for at, (a, b) in enumerate(zip(self.names, met, strict=False)) if a != b),
            min(len(self.names), len(met)),
        )
        expected = repr(self.names[at]) if at < len(self.names) else "the end"
        found = repr(met[at]) if at < len(met) else "the end"
        declared, counted = Counter(self.names), Counter(met)
        counts = ", ".join(
            f"{name} {counted[name]} of {declared[name]}" for name in sorted({*declared, *counted})
        )
        raise RegionMismatch(
            f"{graph}: region {at} should be {expected} and is {found}; met {counts}",
            hint="call regions as ops, never their bodies, and declare each in the model's manifest",
        )


def begin_forward(ctx: StepContext) -> None:
    """Forget all derived tables: the first thing in every forward, recorded, replayed or eager."""
    for rows in ctx.inputs.rows.values():
        rows.drop()
