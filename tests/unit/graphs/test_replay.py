"""Do replayed decode steps give what eager steps give, and do other steps stay eager?"""

import pytest
import torch

from tokamak.core.inputs import Rows, StepInputs
from tokamak.device.facts import cpu_facts
from tokamak.graphs.replay import FIRST_BLOCKS, DecodeReplay
from tokamak.ops.embedding import embed
from tokamak.ops.jit.available import fits
from tokamak.ops.load import load_backends

load_backends()

TABLE = torch.arange(40.0).view(10, 4)
needs_kernels = pytest.mark.skipif(not fits(cpu_facts()), reason="kernels cannot be compiled here")


class Counting:
    """A model's forward that counts how often it runs as Python."""

    def __init__(self, call):
        self.calls = 0
        self._call = call

    def __call__(self, step):
        self.calls += 1
        return self._call(step)


def kernels_only(step):
    call, _ = embed.bind(cpu_facts())
    return call(step.token_ids, TABLE)


def a_step(ids, *, blocks=3, prefill=0, padding=0):
    requests = len(ids) - padding
    return StepInputs(
        token_ids=torch.tensor(ids, dtype=torch.int32),
        positions=torch.zeros(len(ids), dtype=torch.int32),
        query_starts=torch.arange(requests + 1, dtype=torch.int32),
        logit_rows=torch.arange(requests),
        rows={
            "keys": Rows(
                torch.zeros((requests, blocks), dtype=torch.int32),
                torch.ones(requests, dtype=torch.int32),
                torch.zeros(len(ids), dtype=torch.int64),
                16,
            )
        },
        prefill_requests=prefill,
        prefill_tokens=prefill,
    )


@needs_kernels
def test_a_row_count_is_run_once_and_then_replayed():
    forward = Counting(kernels_only)
    replay = DecodeReplay(forward)

    results = [replay.run(a_step(ids)).clone() for ids in ([1, 2], [3, 4], [9, 0])]

    assert forward.calls == 1
    for ids, result in zip(([1, 2], [3, 4], [9, 0]), results, strict=True):
        assert torch.equal(result, TABLE[ids])


@needs_kernels
def test_row_counts_have_recordings_of_their_own():
    forward = Counting(kernels_only)
    replay = DecodeReplay(forward)

    for ids in ([1], [1, 2], [3], [4, 5]):
        assert torch.equal(replay.run(a_step(ids)), TABLE[ids])

    assert forward.calls == 2


@needs_kernels
def test_longer_requests_are_recorded_anew_with_room_to_grow():
    forward = Counting(kernels_only)
    replay = DecodeReplay(forward)

    for blocks in (FIRST_BLOCKS, FIRST_BLOCKS + 1, 2 * FIRST_BLOCKS, 2):
        replay.run(a_step([1], blocks=blocks))

    assert forward.calls == 2


@pytest.mark.parametrize("step", [a_step([1, 2], prefill=1), a_step([1, 2, 0], padding=1)])
def test_prefill_and_padded_steps_run_op_by_op(step):
    forward = Counting(kernels_only)
    replay = DecodeReplay(forward)

    for _ in range(2):
        replay.run(step)

    assert forward.calls == 2


def test_a_model_that_calls_other_ops_is_left_alone():
    forward = Counting(lambda step: TABLE[step.token_ids.long()] + 1)
    replay = DecodeReplay(forward)

    results = [replay.run(a_step([at])) for at in (1, 2, 3)]

    assert forward.calls == 3
    assert torch.equal(results[2], TABLE[[3]] + 1)
