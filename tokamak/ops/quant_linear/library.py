"""Does PyTorch's product of 8-bit rows and weights work here, and which products does it take? Asked once per device.

`scaled_mm` with a scale per 128 columns of a row and per 128 x 128 numbers of the weight is cuBLAS's; releases differ
in the layouts of scales they accept. Where it is missing, refuses or is wrong, our kernel multiplies.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.core.weight import widened
from tokamak.ops.quant_linear.reference import GROUP, ScaleBlocks

log = logging.getLogger(__name__)

LEAST_ROWS = 256
"""Rows from which it is the faster one."""
WHOLE_GROUPS = 4
"""Groups of columns must be a multiple of so many."""
CHECKED = (256, 384, 1024)
"""Rows, features and columns of the product it is checked with."""
CLOSE = 2.0**-6


def suits(blocks: ScaleBlocks, columns: int) -> bool:
    """Whether it has products with such a weight."""
    return blocks[:2] == (GROUP, GROUP) and columns % (GROUP * WHOLE_GROUPS) == 0


def takes(rows: int, columns: int, blocks: ScaleBlocks, out_dtype: torch.dtype) -> bool:
    """Whether it has a product of these sizes, and is the faster one."""
    return rows >= LEAST_ROWS and out_dtype == torch.bfloat16 and suits(blocks, columns)


def multiply(x: Tensor, row_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Rows of 8 bits times a weight: arguments as of `multiply_many`; returns [rows, features] bfloat16."""
    recipe = functional.ScalingType
    return functional.scaled_mm(
        x, codes.T,
        scale_a=row_scales.T.contiguous().T, scale_recipe_a=recipe.BlockWise1x128,
        scale_b=scales.T, scale_recipe_b=recipe.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip


@lru_cache
def agrees(device: torch.device) -> bool:
    """Whether it is there and gives what the definition does; waits for the device when first asked."""
    if device.type != "cuda" or not hasattr(functional, "scaled_mm"):
        return False
    rows, features, columns = CHECKED
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn((rows + features, columns), generator=generator, device=device)
    codes = numbers.to(torch.float8_e4m3fn)
    x, weight = codes[:rows], codes[rows:]
    factors = torch.rand((rows + features, columns // GROUP), generator=generator, device=device)
    row_scales, scales = factors[:rows], factors[: features // GROUP].contiguous() / columns
    expected = (x.float() * row_scales.repeat_interleave(GROUP, 1)) @ widened(
        weight, scales, (GROUP, GROUP)
    ).T
    try:
        found = multiply(x, row_scales, weight, scales).float()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        log.warning("PyTorch multiplies no 8-bit numbers here, so our kernel does: %s", error)
        return False
    good = bool((found - expected).norm() <= CLOSE * expected.norm())
    if not good:
        log.warning("PyTorch's product of 8-bit numbers is wrong here, so our kernel multiplies")
    return good
