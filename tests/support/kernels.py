"""What does a compiled Triton kernel do with its arguments?"""

from __future__ import annotations

import re
from typing import Any


def uses_of(argument: str, kernel: Any) -> set[str]:
    """The operations of a kernel that take an argument, before any optimisation for a chip."""
    lines = (line.strip() for line in kernel.asm["ttir"].splitlines())
    uses = (re.fullmatch(rf"%\S+ = (\S+) .*%{argument}\b.*", line) for line in lines)
    return {use.group(1) for use in uses if use}
