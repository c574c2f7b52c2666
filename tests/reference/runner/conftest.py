"""What every test of a rank starts from: one thread, and quick collections of garbage."""

import gc

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _collections_look_at_new_objects():
    """Every recording collects garbage first, which takes long among all the objects that tests import."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
