"""Do compiled kernels share work among threads?"""

import threading
from pathlib import Path

import pytest
import torch

from tokamak.device.facts import cpu_facts
from tokamak.ops.jit.available import fits

if not fits(cpu_facts()):
    pytest.skip("kernels cannot be compiled here", allow_module_level=True)

from tokamak.ops.jit.compiler import KernelSource, Library

ITEMS, COUNTS, NUMBERS, TURNS = range(4)


def count_items(kernel):
    """Add 1 to every item's cell after some turns of work, and write which thread did it."""
    counts, numbers = kernel.pointer(COUNTS, "i64"), kernel.pointer(NUMBERS, "i64")
    with kernel.items(kernel.integer(ITEMS)) as item:
        number = kernel.var(kernel.float(1.0))
        with kernel.loop(0, kernel.integer(TURNS)):
            number.set(number.now * 0.5 + 1.0)
        never = (number.now < 0.0).where(kernel.int(1), kernel.int(0))
        numbers[item].store(kernel.thread() + never)
        counts[item].store(counts[item].load() + 1)


@pytest.fixture(scope="module")
def library():
    sources = [KernelSource("count_items", 4, count_items)]
    return Library("test", [Path(__file__)], sources)


def run_count(library, threads, items, turns):
    counts = torch.zeros(items, dtype=torch.int64)
    numbers = torch.full((items,), -1)
    library.function("count_items")(threads, items, counts.data_ptr(), numbers.data_ptr(), turns)
    return counts, numbers


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("items", [0, 1, 2, 1000])
def test_every_item_is_done_once_however_many_threads_there_are(library, threads, items):
    for _ in range(20):
        counts, numbers = run_count(library, threads, items, turns=1)

        assert (counts == 1).all()
        assert ((numbers >= 0) & (numbers < threads)).all()


def test_helpers_take_part_when_there_is_much_to_do(library):
    for _ in range(50):
        _, numbers = run_count(library, threads=2, items=400, turns=100_000)
        if len(numbers.unique()) == 2:
            break

    assert set(numbers.tolist()) == {0, 1}


def test_callers_on_several_threads_do_not_disturb_each_other(library):
    results = []

    def call_often():
        for _ in range(100):
            results.append(bool((run_count(library, 2, 50, turns=10)[0] == 1).all()))

    callers = [threading.Thread(target=call_often) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()

    assert len(results) == 300
    assert all(results)
