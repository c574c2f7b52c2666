"""What tests on a device share."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def no_host_wait() -> Generator[None]:
    """Any hidden wait for the device raises inside."""
    with warnings.catch_warnings():
        # PyTorch calls the mode a prototype each time it is set.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
