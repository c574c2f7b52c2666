# pyright: reportIndexIssue=false
"""How is a Triton kernel launched again soon? Without asking Triton once more what its arguments are like.

A launch looks at every argument, to find the kernel that was compiled for arguments like them, and at the driver's
word on every pointer: several times what the driver itself takes. For a kernel that every step launches from the
host, both are kept here. Kernels in recordings and in prefill need none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor
from triton import knobs
from triton.runtime import driver


class _Compiled(Protocol):
    """What a launch by Triton returns: the kernel it found or compiled, loaded on a device."""

    function: int
    packed_metadata: tuple[int, ...]

    def run(self, *arguments: object) -> None: ...


class Relaunch:
    """Launches one kernel.

    The kernel's parameters come in this order: pointers; integers that it is not specialised for
    (`do_not_specialize`), which fit in 32 bits; integers that it is specialised for; compile-time constants.
    """

    def __init__(self, kernel: object) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[object, ...], _Compiled] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        counts: tuple[int, ...],
        strides: tuple[int, ...],
        constants: tuple[int, ...],
        *,
        num_warps: int,
    ) -> None:
        """Launch on the current stream. The first tensor's device must be the current one."""
        device = tensors[0].get_device()
        addresses = [tensor.data_ptr() for tensor in tensors]
        # Whatever Triton tells arguments apart by. Alignment matters in steps of 16 bytes.
        odd = 0
        for address in addresses:
            odd |= address
        alike = (
            device,
            tuple([address % 16 for address in addresses]) if odd % 16 else 0,
            *[tensor.dtype for tensor in tensors],
            strides,
            constants,
            num_warps,
        )
        compiled = self._compiled.get(alike)
        hooks = knobs.runtime
        if compiled is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            launched = self._kernel[grid](
                *tensors, *counts, *strides, *constants, num_warps=num_warps
            )
            if launched is not None:  # an interpreted kernel has no compiled form
                self._compiled[alike] = cast(_Compiled, launched)
            return
        stream = driver.active.get_current_stream(device)  # pyright: ignore[reportAttributeAccessIssue]
        compiled.run(
            *grid,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,  # what hooks are told, and the hooks
            None,
            None,
            *addresses,
            *counts,
            *strides,
            *constants,
        )
