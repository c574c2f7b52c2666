"""How a computation gets its fast form: one meaning, several backends, chosen once.

`@op` marks a PyTorch function whose body is the definition. `.backend(name, fits=...)` registers another
function with the same signature. `bind` picks the first backend whose `fits` holds for this machine,
in order of registration, and says why; after that a layer makes plain calls. A backend of an op that reads or
writes caches also says which formats of caches other than the rows' own it `takes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar, overload

from tokamak.device.facts import DeviceFacts
from tokamak.errors import NoBackendError

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE = "reference"

OPS: dict[str, Op[..., object]] = {}
"""Every op by name, filled when the modules of `tokamak.ops` are imported."""

Takes = Callable[[DeviceFacts, str], bool]
"""Whether caches may have a format that the rows have not, by its name, such as `fp8`."""


def takes_any(facts: DeviceFacts, cache_dtype: str) -> bool:
    """Caches may have any format, or there are none."""
    del facts, cache_dtype
    return True


def takes_numbers(facts: DeviceFacts, cache_dtype: str) -> bool:
    """Caches may have any format whose rows are numbers, not records."""
    del facts
    return cache_dtype != "native"


def takes_own(facts: DeviceFacts, cache_dtype: str) -> bool:
    """Caches must have the format of the rows."""
    del facts, cache_dtype
    return False


@dataclass(frozen=True, slots=True)
class Backend(Generic[P, R]):
    """One way to run an op. `fits` and `takes` read facts that hold for the whole run."""

    name: str
    call: Callable[P, R]
    fits: Callable[[DeviceFacts], bool]
    takes: Takes = takes_any
    recordable: bool = True
    """Whether a recording of the call holds for other numbers: it reads none of them to the host."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which backend an op got, and why: a line of `tokamak doctor`."""

    op: str
    backend: str
    why: str
    recordable: bool = True


class Op(Generic[P, R]):
    """An op: its reference, and the backends registered for it."""

    def __init__(self, reference: Callable[P, R], *, recordable: bool) -> None:
        self.name: str = reference.__name__
        self.reference = reference
        self.recordable = recordable
        self.__doc__ = reference.__doc__
        self.backends: list[Backend[P, R]] = []

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the reference."""
        return self.reference(*args, **kwargs)

    def backend(
        self,
        name: str,
        *,
        fits: Callable[[DeviceFacts], bool],
        takes: Takes = takes_any,
        before: str | None = None,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register a function as the backend `name`; earlier ones are preferred.

        `before` names a registered backend that this one is preferred to, such as the portable form it is made of.
        """

        def register(call: Callable[P, R]) -> Callable[P, R]:
            names = [backend.name for backend in self.backends]
            at = len(names) if before is None else names.index(before)
            self.backends.insert(at, Backend(name, call, fits, takes))
            return call

        return register

    def bind(
        self, facts: DeviceFacts, prefer: str | None = None, *, cache_dtype: str | None = None
    ) -> tuple[Callable[P, R], Choice]:
        """Choose a backend for this machine.

        Args:
            facts: the device it runs on.
            prefer: forces a backend by name.
            cache_dtype: the format of caches, such as `fp8`; None where it is that of the rows.

        Raises:
            NoBackendError: the preferred backend does not exist or does not fit this machine or the caches.
        """
        if prefer == REFERENCE:
            return self.reference, Choice(self.name, REFERENCE, "asked for", self.recordable)
        passed: list[str] = []
        for candidate in self.backends:
            if prefer is not None and candidate.name != prefer:
                continue
            taken = cache_dtype is None or candidate.takes(facts, cache_dtype)
            if candidate.fits(facts) and not taken:
                passed.append(candidate.name)
            elif candidate.fits(facts):
                why = "asked for" if prefer else f"first that fits {facts.vendor} {facts.arch}"
                why += _without(passed, cache_dtype)
                choice = Choice(self.name, candidate.name, why, candidate.recordable)
                return candidate.call, choice
        if prefer is not None:
            names = ", ".join([*(b.name for b in self.backends), REFERENCE])
            raise NoBackendError(
                f"op {self.name} has no backend {prefer!r} for {facts.vendor} {facts.arch}"
                + _without(passed, cache_dtype),
                hint=f"it has {names}",
            )
        why = "no backend fits this machine" + _without(passed, cache_dtype)
        return self.reference, Choice(self.name, REFERENCE, why, self.recordable)


def _without(passed: Sequence[str], cache_dtype: str | None) -> str:
    """Which backends were passed over for the sake of the caches' format."""
    return f"; caches in {cache_dtype} are not for {', '.join(passed)}" if passed else ""


@overload
def op(reference: Callable[P, R]) -> Op[P, R]: ...
@overload
def op(*, recordable: bool) -> Callable[[Callable[P, R]], Op[P, R]]: ...
def op(
    reference: Callable[P, R] | None = None, *, recordable: bool = True
) -> Op[P, R] | Callable[[Callable[P, R]], Op[P, R]]:
    """Make an op of the function that defines it; `recordable=False` says that it reads numbers to the host."""

    def make(reference: Callable[P, R]) -> Op[P, R]:
        made: Op[P, R] = Op(reference, recordable=recordable)
        OPS[made.name] = made  # pyright: ignore[reportArgumentType]
        return made

    return make if reference is None else make(reference)
