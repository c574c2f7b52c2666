"""Where does memory of the host lie that a GPU reads in place? In mappings of our own, which are pinned when they are full.

PyTorch's own pinned memory comes in powers of two of bytes: for a table of 98 GB it would take 137.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokamak.errors import OptionError

HINT = "use engram_tables=device, a machine with more memory, or end other programs"


def host_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in memory of its own, which is taken as it is written to; `pin` makes it a GPU's to read.

    Raises:
        OptionError: the system does not give so much.
    """
    count = int(np.prod(shape))
    try:
        mapped = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE)
    except OSError as error:
        raise _refused(count * dtype.itemsize, error.strerror or "no memory") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    numbers = np.frombuffer(mapped, dtype=np.uint8)[: count * dtype.itemsize]
    return torch.from_numpy(numbers).view(dtype).view(shape)


def pin(numbers: Tensor) -> Tensor:
    """Hold a tensor of `host_memory` where it is until it dies, so that a GPU may read it; returns the tensor to keep.

    Raises:
        OptionError: the driver does not hold so much.
    """
    if not numbers.numel():
        return numbers
    runtime: Any = torch.cuda.cudart()
    address, count = numbers.data_ptr(), numbers.nbytes
    error = int(runtime.cudaHostRegister(address, count, 0))
    if error:
        raise _refused(count, f"the driver's error {error}")
    owner = numbers.view(torch.uint8).numpy()
    # The array dies with the last tensor over it, and before the mapping that it is of.
    weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(owner).view(numbers.dtype).view(numbers.shape)


def _refused(count: int, why: str) -> OptionError:
    return OptionError(
        f"engram_tables is host, and {count / 1024**3:.4g} GiB of this machine's memory cannot be held for a table: "
        f"{why}",
        hint=HINT,
    )
