"""Several rank processes on this machine: started, watched, and their collectives written to ledgers.

Every process has a watchdog that turns a hang into a stack dump and an end; the parent ends what is left.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from tokamak.runner.group_exchange import GroupExchange, SharedStore

GRACE_S = 5.0
"""What the parent waits beyond the watchdogs of its ranks."""


class Ledger:
    """One line for every collective a rank enters, in a file that outlives the rank."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, group: str, op: str, sizes: Sequence[int]) -> None:
        """Note a collective with the sizes its members must agree on: the whole vector where they differ."""
        self._file.write(f"{group} {op} {list(sizes)}\n")


class LedgerGroup:
    """A process group that writes every collective to a ledger before entering it."""

    def __init__(self, group: ProcessGroup, ledger: Ledger, name: str) -> None:
        self._group = group
        self._ledger = ledger
        self._name = name

    def allgather(self, outputs: list[Tensor], mine: Tensor, timeout: timedelta) -> dist.Work:
        """Equal parts of all ranks."""
        self._ledger.write(self._name, "allgather", [part.numel() for part in outputs])
        return self._group.allgather(outputs, mine, timeout=timeout)

    def allreduce(self, tensor: Tensor, op: dist.ReduceOp, timeout: timedelta) -> dist.Work:
        """One tensor of all ranks, reduced."""
        self._ledger.write(self._name, "allreduce", [tensor.numel()])
        return self._group.allreduce(tensor, op, timeout=timeout)

    def all_to_all(
        self, rows: Tensor, receive: Sequence[int], send: Sequence[int], agreed: Sequence[int]
    ) -> Tensor:
        """Rows [sum(send), width] to all ranks; returns rows [sum(receive), width] from all ranks."""
        self._ledger.write(self._name, "all_to_all", agreed)
        received = rows.new_empty((sum(receive), rows.shape[1]))
        self._group.alltoall_base(received, rows.contiguous(), list(receive), list(send)).wait()
        return received


class CollectiveCount(TorchDispatchMode):
    """Counts every collective of this thread, however it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        self.collectives += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class Rank:
    """What a rank's program gets."""

    rank: int
    ranks: int
    group: LedgerGroup
    store: SharedStore

    def exchange(
        self, *, timeout_s: float = 20.0, kind: type[GroupExchange] = GroupExchange
    ) -> GroupExchange:
        """The exchange of all ranks, its collectives in the ledger."""
        return kind(
            cast(ProcessGroup, self.group),
            rank=self.rank,
            ranks=self.ranks,
            timeout_s=timeout_s,
            store=self.store,
        )


@dataclass(slots=True)
class Outcome:
    """How a rank ended."""

    rank: int
    exit_code: int | None
    value: Any = None
    """What the program returned; None if it did not return."""
    error: Exception | None = None
    """What it raised; None also if it hung or died."""
    ledger: list[str] = field(default_factory=list)
    dump: str = ""
    """What it wrote to stderr: the stacks of a hang."""

    @property
    def returned(self) -> bool:
        """Whether the program came to its end."""
        return self.exit_code == 0 and self.error is None


def run_ranks(
    program: Callable[..., Any], ranks: int, *args: object, deadline_s: float = 30.0
) -> list[Outcome]:
    """Run `program(rank, *args)` in `ranks` processes; a process that takes longer than the deadline is ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tests.support.ranks"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The parent hosts the store, so that it outlives every rank.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes: list[BaseProcess] = [
            context.Process(
                target=_run_rank,
                args=(program, rank, ranks, store.port, folder, deadline_s, args),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + deadline_s + GRACE_S
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        return [
            _read_outcome(folder, rank, process.exitcode) for rank, process in enumerate(processes)
        ]


def _run_rank(
    program: Callable[..., Any],
    rank: int,
    ranks: int,
    port: int,
    folder: Path,
    deadline_s: float,
    args: Sequence[object],
) -> None:
    with (folder / f"{rank}.err").open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    faulthandler.dump_traceback_later(deadline_s, exit=True)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=deadline_s)
    store = TCPStore("127.0.0.1", port, timeout=timeout)
    dist.init_process_group(
        "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=ranks,
        timeout=timeout,
    )
    world = dist.group.WORLD
    assert world is not None
    ledger = Ledger(folder / f"{rank}.ledger")
    group = LedgerGroup(world, ledger, "dp")
    value: Any = None
    error: Exception | None = None
    try:
        value = program(Rank(rank, ranks, group, PrefixStore("exchange", store)), *args)
    except Exception as raised:  # whatever it is, the parent shall see it
        raised.__cause__ = raised.__context__ = raised.__traceback__ = None
        error = raised
    (folder / f"{rank}.outcome").write_bytes(pickle.dumps((value, error)))
    # Peers may be gone or inside a collective; leaving without a goodbye is what a failed rank does.
    os._exit(0)


def _read_outcome(folder: Path, rank: int, exit_code: int | None) -> Outcome:
    told, ledger = folder / f"{rank}.outcome", folder / f"{rank}.ledger"
    value, error = pickle.loads(told.read_bytes()) if told.exists() else (None, None)
    stderr = folder / f"{rank}.err"
    return Outcome(
        rank=rank,
        exit_code=exit_code,
        value=value,
        error=error,
        ledger=ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else [],
        dump=stderr.read_text(encoding="utf-8", errors="replace") if stderr.exists() else "",
    )
