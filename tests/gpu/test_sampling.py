"""Does a GPU draw the host's tokens from the same scores, without a wait?"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.device import no_host_wait
from tokamak.core.request import SamplingParams
from tokamak.device.facts import device_facts
from tokamak.device.staging import staged
from tokamak.ops.load import load_backends
from tokamak.ops.sample import argmax_rows, draw_rows, token_weights, uniforms_of
from tokamak.ops.sample.cases import draw_table
from tokamak.sampling.noise import uniforms
from tokamak.sampling.sampler import Sampler

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="torch.cuda.is_available() is False"),
]
ROWS = 96
VOCAB = 151_936
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(top_k=50),
    "top_p": SamplingParams(top_p=0.95),
    "top_k_top_p": SamplingParams(top_k=50, top_p=0.9, temperature=0.7),
    "min_p": SamplingParams(min_p=0.05),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.1),
    "presence": SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.5),
    "bias": SamplingParams(temperature=0.0, logit_bias={7: 1.0, 9: -1.0}),
}


def a_sampler(device: torch.device, params: list[SamplingParams]) -> Sampler:
    load_backends()
    facts = device_facts(device.type)
    sampler = Sampler(
        vocab_tokens=VOCAB,
        slots=len(params),
        device=device,
        grammar=None,
        entropy=b"same",
        weigh=token_weights.bind(facts)[0],
        find=argmax_rows.bind(facts)[0],
        draw_all=draw_rows.bind(facts)[0],
    )
    for slot, each in enumerate(params):
        sampler.admit(
            slot,
            request_id=f"request-{slot}",
            params=each,
            sibling=0,
            max_tokens=100,
            stop_ids=frozenset(),
            prompt_tokens=4,
            output_ids=(),
        )
    return sampler


def scores(*, flat: bool = False) -> torch.Tensor:
    """Scores like a language model's, or without a preference."""
    generator = torch.Generator().manual_seed(0)
    tail = torch.randn(ROWS, VOCAB, generator=generator)
    if flat:
        return tail
    tail *= 2
    likely = torch.randint(0, VOCAB, (ROWS, 60), generator=generator)
    return tail.scatter(1, likely, torch.linspace(16, 8, 60).expand(ROWS, -1))


@pytest.mark.parametrize("flat", [False, True], ids=["likely tokens", "no likely tokens"])
@pytest.mark.parametrize("kind", [*KINDS, "every kind at once"])
def test_a_gpu_draws_what_the_host_draws_and_waits_for_nothing(kind, flat):
    params = [KINDS.get(kind) or [*KINDS.values()][row % len(KINDS)] for row in range(ROWS)]
    host, device = torch.device("cpu"), torch.device("cuda")
    slots, positions = np.arange(ROWS, dtype=np.int32), np.full(ROWS, 8, np.int32)
    history = torch.randint(0, VOCAB, (ROWS, 16), dtype=torch.int32)
    logits = scores(flat=flat)
    expected = a_sampler(host, params).sample(logits.clone(), slots, positions, history)
    sampler = a_sampler(device, params)
    on_gpu, gpu_history = logits.cuda(), history.cuda()
    where = torch.from_numpy(slots).cuda(), torch.from_numpy(positions).cuda()
    sampler.sample(on_gpu.clone(), slots, positions, gpu_history, where)
    again = on_gpu.clone()
    torch.cuda.synchronize()

    with no_host_wait():
        found = sampler.sample(again, slots, positions, gpu_history, where)

    same = (found.token_ids.cpu() == expected.token_ids).float().mean()
    # A draw may fall between two tokens' shares, which differ in their last bits.
    assert same >= (1.0 if params[0].greedy and kind in KINDS else 0.97)
    assert sampler.waits.host_waits == 0
    assert found.peaks is not None


def test_a_row_draws_the_same_alone_and_in_a_batch():
    facts = device_facts("cuda")
    call = draw_rows.bind(facts)[0]
    asked = [
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_p": 0.999, "temperature": 2.0},
    ]
    table = draw_table([asked[row % len(asked)] for row in range(ROWS)], VOCAB).cuda()
    logits = scores().cuda()
    slots = torch.arange(ROWS, dtype=torch.int32, device="cuda")

    together = call(logits, table, slots, slots)[0].tolist()

    for row in range(0, ROWS, 5):
        cut = slice(row, row + 1)
        assert call(logits[cut], table, slots[cut], slots[cut])[0].tolist() == together[cut]


def test_the_random_numbers_of_a_gpu_are_the_hosts_bit_by_bit():
    chance = np.random.default_rng(3)
    keys = chance.integers(0, 2**64, 5000, dtype=np.uint64)
    positions = chance.integers(0, 2**20, 5000).astype(np.int32)

    found = uniforms_of(
        torch.from_numpy(keys.view(np.int64)).cuda(), torch.from_numpy(positions).cuda()
    )

    np.testing.assert_array_equal(found.cpu().numpy(), uniforms(keys, positions))


def test_staged_numbers_arrive_behind_what_is_launched_and_survive_their_array():
    device = torch.device("cuda")
    torch.cuda._sleep(200_000_000)

    with no_host_wait():
        kept = []
        for at in range(200):
            values = np.full(1000, at, np.int64)
            kept.append(staged(values, device))
            values.fill(-1)
            del values

    assert [int(each.sum()) for each in kept] == [1000 * at for at in range(200)]
    assert staged(np.empty(0, np.int64), device).shape == (0,)
