"""How do decode steps on a CPU run without Python between their ops? Recorded per row count, replayed.

A decode step of n rows makes the same kernel calls every time; only the numbers in its inputs differ. The
first step of n rows runs on inputs this object owns and is recorded (`ops/jit/recording.py`); later ones
copy their inputs there and replay. A model that calls anything but compiled kernels is left alone.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokamak.core.inputs import Rows, StepInputs
from tokamak.ops.jit.recording import Recording, record

logger = logging.getLogger(__name__)

MOST_RECORDINGS = 64
FIRST_BLOCKS = 32
"""Block table columns of the first recordings; longer requests are recorded anew with twice as many."""


@dataclass(slots=True)
class _Recorded:
    """A recording, and the inputs it reads."""

    inputs: StepInputs
    recording: Recording


class DecodeReplay:
    """Runs a model's forward over decode steps, from recordings where there are some."""

    def __init__(self, forward: Callable[[StepInputs], Tensor]) -> None:
        self._forward = forward
        self._recorded: OrderedDict[int, _Recorded] = OrderedDict()
        self._refused = False

    def run(self, step: StepInputs) -> Tensor:
        """Hidden states [tokens, width]; the next step of as many rows overwrites them."""
        tokens = step.token_ids.shape[0]
        if self._refused or not _is_decode(step):
            return self._forward(step)
        kept = self._recorded.get(tokens)
        if kept is None or not _fits(step, kept.inputs):
            return self._record(step)
        self._recorded.move_to_end(tokens)
        _copy(step, kept.inputs)
        return kept.recording.replay()

    def _record(self, step: StepInputs) -> Tensor:
        own = _own_inputs(step)
        _copy(step, own)
        result, recording, met = record(lambda: self._forward(own))
        if recording is None:
            self._refused = True
            logger.info(
                "Decode steps run op by op: this model also calls %s.", ", ".join(sorted(met))
            )
            return result
        self._recorded[step.token_ids.shape[0]] = _Recorded(own, recording)
        if len(self._recorded) > MOST_RECORDINGS:
            self._recorded.popitem(last=False)
        return result


def _is_decode(step: StepInputs) -> bool:
    """Whether every token row is a request's one query, and the device is a CPU."""
    tokens = step.token_ids.shape[0]
    requests = step.query_starts.shape[0] - 1
    return (
        step.prefill_requests == 0
        and tokens == requests > 0
        and step.token_ids.device.type == "cpu"
    )


def _fits(step: StepInputs, own: StepInputs) -> bool:
    """Whether every block table fits the one that was recorded."""
    return all(
        rows.block_table.shape[1] <= own.rows[group].block_table.shape[1]
        for group, rows in step.rows.items()
    )


def _own_inputs(step: StepInputs) -> StepInputs:
    """Tensors of the step's shapes with room in the block tables."""
    rows = {}
    for group, of in step.rows.items():
        requests, blocks = of.block_table.shape
        room = FIRST_BLOCKS
        while room < blocks:
            room *= 2
        table = torch.zeros((requests, room), dtype=of.block_table.dtype)
        lengths, slots = torch.empty_like(of.lengths), torch.empty_like(of.write_slots)
        rows[group] = Rows(table, lengths, slots, of.block_tokens)
    return StepInputs(
        token_ids=torch.empty_like(step.token_ids),
        positions=torch.empty_like(step.positions),
        query_starts=torch.empty_like(step.query_starts),
        logit_rows=step.logit_rows,
        rows=rows,
        prefill_requests=0,
        prefill_tokens=0,
    )


def _copy(step: StepInputs, own: StepInputs) -> None:
    """Refill the recorded inputs."""
    own.token_ids.copy_(step.token_ids)
    own.positions.copy_(step.positions)
    own.query_starts.copy_(step.query_starts)
    for group, of in step.rows.items():
        to = own.rows[group]
        to.block_table[:, : of.block_table.shape[1]].copy_(of.block_table)
        to.lengths.copy_(of.lengths)
        to.write_slots.copy_(of.write_slots)
