"""Inputs of the fill ops: prompts, mixed and decode steps, padding in token rows and in request rows."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import torch

from tokamak.ops.case import Case
from tokamak.ops.step_prep.derived import tile_room


@dataclass(frozen=True, slots=True)
class Sizes:
    """What differs between cases."""

    prefill: tuple[tuple[int, int], ...] = ()
    """Queries of a request in this step, and tokens cached before."""
    decode: tuple[int, ...] = ()
    """Cached tokens of each request."""
    q_width: int = 1
    """Queries of a decode row."""
    padding_tokens: int = 0
    padding_requests: int = 0
    """Only in steps without prefill; each has q_width queries."""
    granted: int = 0
    groups: int = 1
    block_tokens: int = 16


def random_sizes(chance: random.Random) -> Sizes:
    """A step of a random kind."""
    prefill = [(chance.randint(1, 20), chance.randint(0, 30)) for _ in range(chance.randint(0, 3))]
    least = 0 if prefill else 1
    return Sizes(
        prefill=tuple(prefill),
        decode=tuple(chance.randint(0, 50) for _ in range(chance.randint(least, 6))),
        q_width=chance.choice([1, 4]),
        padding_tokens=chance.randint(0, 9) if prefill else 0,
        padding_requests=0 if prefill else chance.randint(0, 4),
        granted=chance.choice([0, 1, 5, 20]),
        groups=chance.choice([1, 2]),
        block_tokens=chance.choice([4, 16]),
    )


def make_step(seed: str, sizes: Sizes) -> tuple[object, ...]:
    """Arguments of `fill_step`; what it writes holds stale numbers."""
    chance = random.Random(seed)
    lens = [queries for queries, _ in sizes.prefill] + [sizes.q_width] * len(sizes.decode)
    before = [cached for _, cached in sizes.prefill] + list(sizes.decode)
    requests, tokens, pads = len(lens), sum(lens), sizes.padding_requests
    running_requests = requests + pads
    running_tokens = tokens + pads * sizes.q_width + sizes.padding_tokens
    longest = max(at + length for at, length in zip(before, lens, strict=True))
    columns = -(-longest // sizes.block_tokens) + chance.randint(0, 1)
    slots, blocks = requests + 3, columns + 2
    order = chance.sample(range(1, slots), requests) + [0] * pads
    starts = [0]
    for length in lens + [sizes.q_width] * pads:
        starts.append(starts[-1] + length)
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    places = [
        (g, s, b) for g in range(sizes.groups) for s in range(1, slots) for b in range(blocks)
    ]
    granted = chance.sample(places, min(sizes.granted, len(places)))
    grants = [(*place, 1000 + at) for at, place in enumerate(granted)]
    tables = torch.randint(1, 900, (sizes.groups, slots, blocks), generator=generator).int()
    tables[:, 0] = 0
    return (
        torch.tensor(order, dtype=torch.int32),
        torch.tensor(before + [0] * pads, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(grants, dtype=torch.int32).reshape(-1, 4).T.contiguous(),
        torch.randint(1, 500, (slots, longest + 5), generator=generator).int(),
        tables,
        requests,
        tokens,
        sizes.block_tokens,
        columns,
        torch.full((running_tokens,), 77, dtype=torch.int32),
        torch.full((running_tokens,), 77, dtype=torch.int32),
        torch.full((sizes.groups, running_tokens), 77, dtype=torch.int64),
        torch.full((sizes.groups, running_requests, blocks), 77, dtype=torch.int32),
    )


STEP_CHANGED = (5, 10, 11, 12, 13)

SIZES = {
    "prompt": Sizes(prefill=((37, 0),), granted=3),
    "chunks": Sizes(prefill=((16, 16), (5, 40), (1, 0)), padding_tokens=3, granted=5),
    "mixed": Sizes(prefill=((12, 4),), decode=(0, 15, 16, 17), padding_tokens=7, granted=4),
    "mixed, two groups": Sizes(prefill=((12, 4),), decode=(30, 3), groups=2, granted=9),
    "long prompts": Sizes(prefill=((1500, 20), (700, 0)), padding_tokens=400, granted=300),
    "decode": Sizes(decode=(176,)),
    "decode of many": Sizes(decode=tuple(range(1, 200, 3)), granted=5),
    "padded decode": Sizes(decode=(5, 60, 33), padding_requests=5, granted=2),
    "wide decode": Sizes(decode=(5, 60, 33), q_width=4, padding_requests=2, groups=2, granted=2),
}

fill_step_cases = [
    Case(name, partial(make_step, name, sizes), 0.0, STEP_CHANGED) for name, sizes in SIZES.items()
]


def _indptrs(lengths: tuple[int, ...], block_tokens: int) -> tuple[object, ...]:
    out = torch.full((len(lengths) + 1,), 77, dtype=torch.int32)
    return torch.tensor(lengths, dtype=torch.int32), block_tokens, out


fill_indptrs_cases = [
    Case(name, partial(_indptrs, lengths, block_tokens), 0.0, (2,))
    for name, lengths, block_tokens in (
        ("one request", (5,), 4),
        ("block edges", (1, 15, 16, 17, 31, 32, 33), 16),
        ("padding rows", (100, 1, 1, 1), 16),
        ("no request", (), 16),
    )
]


def _tiles(lens: tuple[int, ...], width: int, padding_tokens: int) -> tuple[object, ...]:
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    room = tile_room(len(lens), sum(lens) + padding_tokens, width)
    return starts, width, torch.full((room, 2), 77, dtype=torch.int32)


fill_unit_tiles_cases = [
    Case(name, partial(_tiles, lens, width, padding), 0.0, (2,))
    for name, lens, width, padding in (
        ("decode", (1, 1, 1, 1), 16, 0),
        ("tile edges", (15, 16, 17, 32, 33, 1), 16, 0),
        ("padding rows", (20, 1, 1), 8, 13),
        ("tiles of one", (3, 1, 2), 1, 0),
        ("requests without rows", (4, 0, 0, 9), 4, 0),
    )
]
