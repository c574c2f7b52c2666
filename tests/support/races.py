"""Does a forward use what side streams work on, before it waits for them? Watched on a CPU, where nothing runs beside.

Every operator says which memory it reads and writes. Between a fork and its join nobody else may write what the fork
read, read or write what it wrote, or let go of what it read: on a GPU that memory would be given to the next operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokamak.graphs.streams import SideStreams

Memory = dict[int, UntypedStorage]
"""Storages by their address as an object; held, so that no other takes the address."""


@dataclass(slots=True)
class Fork:
    """What a side stream reads and writes until it is joined."""

    reads: Memory = field(default_factory=dict)
    writes: Memory = field(default_factory=dict)


class Watch(TorchDispatchMode):
    """Notes what operators of the compute stream and of open forks touch."""

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.joined: list[str] = []
        """Names of forks whose work was seen, as often as they were joined."""
        self._open: dict[str, Fork] = {}
        self._side: str | None = None

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """What runs inside is the fork's."""
        before, self._side = self._side, name
        self._open[name] = Fork()
        try:
            yield
        finally:
            self._side = before

    def join(self, name: str) -> None:
        """The fork is waited for: what it read and did not write must still be somebody's."""
        fork = self._open.pop(name)
        for key, storage in fork.reads.items():
            # Ours is one reference, and the wrapper that asks another.
            if key not in fork.writes and torch._C._storage_Use_Count(storage._cdata) < 2:
                self.races.append(
                    f"{name} reads {storage.nbytes()} bytes that nobody holds any more"
                )
        if fork.writes:
            self.joined.append(name)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        given = _storages((args, kwargs))
        changed = _storages(
            [
                kwargs.get(each.name, args[at] if at < len(args) else None)
                for at, each in enumerate(func._schema.arguments)
                if each.alias_info is not None and each.alias_info.is_write
            ]
        )
        made = {key: each for key, each in _storages(found).items() if key not in given}
        if changed or made:
            self._note(str(func), given, changed | made)
        return found

    def _note(self, name: str, reads: Memory, writes: Memory) -> None:
        if self._side is not None:
            self._open[self._side].reads.update(reads)
            self._open[self._side].writes.update(writes)
        for side, fork in self._open.items():
            if side == self._side:
                continue
            if reads.keys() & fork.writes.keys():
                self.races.append(f"{name} reads what {side} writes")
            if writes.keys() & (fork.reads.keys() | fork.writes.keys()):
                self.races.append(f"{name} writes what {side} uses")


def _storages(values: object) -> Memory:
    found = [each.untyped_storage() for each in tree_leaves(values) if isinstance(each, Tensor)]
    return {each._cdata: each for each in found}


class WatchedStreams(SideStreams):
    """Side streams of a CPU that tell a watch of their forks and joins."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(torch.device("cpu"))
        self._watch = watch

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """See `SideStreams`."""
        with super().fork(name), self._watch.beside(name):
            yield

    def join(self, name: str) -> None:
        """See `SideStreams`."""
        super().join(name)
        self._watch.join(name)
