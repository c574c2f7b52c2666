"""How does a Triton kernel follow the one before it? By itself, unless a chip knows better.

START and READY of a kernel are what it may do when a program begins, and before it reads what kernels before
it wrote. The other keys say how it is launched.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl  # noqa: F401 - the interpreter looks for it beside every kernel


@triton.jit
def nothing() -> None:
    """The stream starts a kernel when the one before is done."""


IN_ORDER: Mapping[str, object] = {"START": nothing, "READY": nothing}
