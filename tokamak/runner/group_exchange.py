"""How do the rows of a step cross data-parallel ranks? One all-gather over the host's network.

Errors end the group: the peers are already inside a collective, so nobody may go on alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import ProcessGroup, ReduceOp, Work

from tokamak.core.plan import StepPlan
from tokamak.errors import ConfigMismatch, ExchangeTimeout, StepDesync
from tokamak.runner.exchange import COLUMNS, RankRow, Rows, rank_row, text_hash

BEFORE_STEPS = -2
"""The number of no step, nor of what a start runs to warm up: one rank's introduction meets no other's step."""
SURVIVOR_S = 1.0
"""How long survivors of a failed exchange wait for each other's sign of life."""
POLL_S = 0.02


class SharedStore(Protocol):
    """A small dictionary all ranks see, such as torch's `PrefixStore`."""

    def set(self, key: str, value: str, /) -> None:
        """Put a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there; does not wait."""
        ...


class GroupExchange:
    """The exchange of the ranks of one process group; its buffers are made once.

    Args:
        group: ranks with the same coordinates on all other axes, over a host transport (gloo).
        rank: this rank's place in the group.
        ranks: how many there are, 2 or more where it matters.
        timeout_s: how long a rank may be late.
        store: where ranks that survive a failure meet; its keys belong to this exchange alone.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        rank: int,
        ranks: int,
        timeout_s: float,
        store: SharedStore,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.last_s: float | None = None
        self._group = group
        self._timeout_s = timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        self._store = store
        self._config = ""
        # On the host by name: a default device would put them where gloo cannot read (F30).
        self._mine = torch.zeros(len(COLUMNS), dtype=torch.int32, device="cpu")
        self._gathered = torch.zeros((ranks, len(COLUMNS)), dtype=torch.int32, device="cpu")
        self._ballot = torch.zeros(1, dtype=torch.int32, device="cpu")
        self._parts = list(self._gathered.unbind())
        self._mine_array = self._mine.numpy()
        self._rows: Rows = self._gathered.numpy().view()
        self._rows.flags.writeable = False

    def introduce(self, config: str) -> None:
        """Hold this rank's `config_text` against its peers'; the first of all collectives.

        Raises:
            ExchangeTimeout: a rank is late by `timeout_s`, or gone.
            ConfigMismatch: ranks have other ladders or switches.
        """
        self._config = config
        nothing = rank_row(StepPlan.empty(BEFORE_STEPS))
        self.gather_rows(nothing._replace(config_hash=text_hash(config)))

    def gather_rows(self, row: RankRow) -> Rows:
        """All ranks' rows, int32 [ranks, columns], read-only; the next call overwrites them.

        Raises:
            ExchangeTimeout: a rank is late by `timeout_s`, or gone.
            StepDesync: ranks are at different steps.
            ConfigMismatch: while ranks introduce themselves, one has other ladders or switches.
        """
        self._mine_array[:] = row
        start = time.perf_counter()
        self._carry(
            lambda: self._group.allgather(self._parts, self._mine, timeout=self._timeout),
            f"the exchange of step {row.seq}" if row.seq >= 0 else "the exchange of a start",
        )
        self.last_s = time.perf_counter() - start
        self._check_steps(self._rows[:, COLUMNS["seq"]].tolist())
        self._check_configs(self._rows[:, COLUMNS["config_hash"]].tolist())
        return self._rows

    def vote(self, ok: bool, /) -> bool:
        """Whether every rank says ok; a collective, outside of steps.

        Raises:
            ExchangeTimeout: a rank is late by `timeout_s`, or gone.
        """
        self._ballot.fill_(int(ok))
        self._carry(
            lambda: self._group.allreduce(self._ballot, ReduceOp.MIN, timeout=self._timeout),
            "a vote",
        )
        return bool(self._ballot.item())

    def _carry(self, launch: Callable[[], Work], what: str) -> None:
        start = time.monotonic()
        try:
            launch().wait()
        except RuntimeError as error:
            waited_s = time.monotonic() - start
            raise self._lost(what, waited_s) from error

    def _lost(self, what: str, waited_s: float) -> ExchangeTimeout:
        """The error of a failed collective, after asking who else is still there."""
        waited = f"after {waited_s:.1f} s of at most {self._timeout_s:g} s"
        try:
            heard = self._meet("lost", "here")
        except (RuntimeError, OSError) as gone:
            return ExchangeTimeout(
                f"{what} failed {waited} on rank {self.rank}; the store that lists the ranks which "
                f"answered is gone as well ({gone})",
                hint="the process that hosts the store has ended: its log says why",
            )
        silent = [rank for rank in range(self.ranks) if rank not in heard]
        if not silent:
            return ExchangeTimeout(
                f"{what} failed {waited}, and {_named(sorted(heard))} answered afterwards",
                hint="the network between them failed, or one was late by more than the timeout",
            )
        return ExchangeTimeout(
            f"{what} failed {waited}: no answer from {_named(silent)}; answered: {_named(sorted(heard))}",
            hint=f"{_named(silent)} hangs or has ended: its log says why",
        )

    def _check_steps(self, steps: Sequence[int]) -> None:
        if len(set(steps)) > 1:
            places = ", ".join(f"rank {rank} at step {seq}" for rank, seq in enumerate(steps))
            raise StepDesync(
                f"ranks are at different steps: {places}",
                hint="every rank enters every step, with or without work of its own",
            )

    def _check_configs(self, hashes: Sequence[int]) -> None:
        if len(set(hashes)) > 1:
            texts = self._meet("config", self._config)
            raise ConfigMismatch(
                f"ranks were started with different settings: {_differences(texts) or hashes}",
                hint="start all ranks with the same options and the same version",
            )

    def _meet(self, topic: str, word: str) -> dict[int, str]:
        """Leave a word in the store; by rank, the words of those that left one within SURVIVOR_S."""
        self._store.set(f"{topic}/{self.rank}", word)
        deadline = time.monotonic() + SURVIVOR_S
        left = set(range(self.ranks))
        words: dict[int, str] = {}
        while left:
            for rank in sorted(left):
                if self._store.check([f"{topic}/{rank}"]):
                    words[rank] = self._store.get(f"{topic}/{rank}").decode()
                    left.remove(rank)
            if time.monotonic() > deadline:
                break
            if left:
                time.sleep(POLL_S)
        return words


def _named(ranks: Sequence[int]) -> str:
    """Ranks in words: `rank 1`, or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _differences(texts: Mapping[int, str]) -> str:
    """The settings that are not the same in all texts, with the value of each rank."""
    settings = {
        rank: dict(line.split(" = ", 1) for line in text.splitlines())
        for rank, text in texts.items()
    }
    names = sorted({name for values in settings.values() for name in values})
    different: list[str] = []
    for name in names:
        values = {rank: settings[rank].get(name, "absent") for rank in sorted(settings)}
        if len(set(values.values())) > 1:
            by_rank = ", ".join(f"{value} on rank {rank}" for rank, value in values.items())
            different.append(f"{name} is {by_rank}")
    return "; ".join(different)
