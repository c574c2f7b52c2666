"""How do a step's numbers lie on the host until they are copied to the device, and do they fit?"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tokamak.core.plan import Int32s, StepPlan, StepShape
from tokamak.errors import ArenaOverflow, ShapeInvariant


class Half:
    """One of two host copies of the arena; it may be written once its last copy has been read."""

    def __init__(self, layout: Mapping[str, slice], size: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.packed = torch.zeros(size, dtype=torch.int32, pin_memory=on_cuda)
        self.array: Int32s = self.packed.numpy()
        self.member = {name: self.array[place] for name, place in layout.items()}
        # PyTorch's own event, as that of torch.cuda makes a stream object at every record.
        self.copied = torch.Event(device) if on_cuda else None


def lay_out(**lengths: int) -> tuple[dict[str, slice], int]:
    """Places of members of these lengths one behind the other, and the length of all."""
    places: dict[str, slice] = {}
    end = 0
    for name, length in lengths.items():
        places[name] = slice(end, end + length)
        end += length
    return places, end


def check_room(plan: StepPlan, shape: StepShape, limits: tuple[int, int, int]) -> None:
    """Refuse a step that does not fit: into the buffers, or into the shape that was settled for it.

    `limits` are request rows, token rows, and tokens in one request that the buffers hold.

    Raises:
        ArenaOverflow: the step is larger than the buffers.
        ShapeInvariant: the shape runs fewer rows than the plan has.
    """
    sizes = (shape.running_requests, shape.running_tokens, plan.longest_tokens)
    max_requests, max_tokens, max_model_len = limits
    if sizes[0] > max_requests or sizes[1] > max_tokens or sizes[2] > max_model_len:
        raise _overflow(plan, sizes, limits)
    real, running = plan.scheduled_tokens, shape.running_tokens
    if plan.scheduled_requests > shape.running_requests or real > running:
        raise ShapeInvariant(
            f"step {plan.seq} has {plan.scheduled_requests} request rows and {real} token rows, and "
            f"its shape runs {shape.running_requests} and {running}",
            hint="a bucket must hold the whole plan",
        )


def _overflow(
    plan: StepPlan, sizes: tuple[int, int, int], limits: tuple[int, int, int]
) -> ArenaOverflow:
    whats = ("request rows", "token rows", "tokens in one request")
    options = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    at = next(at for at, (size, room) in enumerate(zip(sizes, limits, strict=True)) if size > room)
    return ArenaOverflow(
        f"step {plan.seq} has {sizes[at]} {whats[at]}, and the input buffers hold {limits[at]}",
        hint=f"raise {options[at]} to {sizes[at]} or run smaller steps",
    )
