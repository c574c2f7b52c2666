"""The process that compiles kernels ahead, on a machine without the GPU it compiles for.

`python -m tests.support.compiling` reads an order like the real one. With the word `list` it prints what it would
compile, one kernel a line, and compiles nothing.
"""

from __future__ import annotations

import sys

import msgspec

from tests.support.configs import GPU
from tokamak.device import facts
from tokamak.ops.triton_launches import Job
from tokamak.runner.ahead import Order


def main() -> int:
    """Answer as if the GPU were there."""
    facts.probe_nvidia = lambda: facts.GpuProbe(GPU)
    # Imports Triton, which a test's own process must not change the driver of.
    from tokamak.runner import compile_ahead

    if sys.argv[1:] != ["list"]:
        return compile_ahead.main()
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)

    def show(job: Job) -> None:
        sys.stdout.write(f"{job.args[0].fn.__name__}\n")

    compile_ahead.note_kernels(order.config, order.multiprocessors, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
