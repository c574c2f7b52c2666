"""How does the body of an eager region keep to real rows? It cuts its inputs, and clears what it did not write.

Nothing else slices by real rows: recorded segments run at the bucket's height, padding included.
"""

from __future__ import annotations

from torch import Tensor

from tokamak.core.context import StepContext
from tokamak.core.inputs import AttnHalf


def cut(half: AttnHalf, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The token rows of one half of a step. tensors: [running tokens, ...]."""
    return tuple(tensor[half.tokens] for tensor in tensors)


def hand_back(context: StepContext, out: Tensor) -> None:
    """Fill the rows no half has written, so that what later segments read is finite. out: [running tokens, ...]."""
    fill_padding(context, context.pad_value, out)


def fill_padding(context: StepContext, value: float, *tensors: Tensor) -> None:
    """Fill the rows that are padding; nothing is launched where there are none. tensors: [running tokens, ...]."""
    for tensor in tensors:
        padding = tensor[context.attn.tokens :]
        if padding.numel():
            padding.fill_(value)
