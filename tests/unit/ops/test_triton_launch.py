"""Is a Triton kernel launched again as it was launched first, and only where its arguments are alike?"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]

STREAM = 77


class Kernel:
    """A kernel that notes its launches, and those of what it compiled."""

    def __init__(self, *, compiles: bool = True) -> None:
        self.compiled: list[tuple[object, ...]] = []
        self.relaunched: list[tuple[object, ...]] = []
        self._compiles = compiles

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            self.compiled.append((grid, arguments, num_warps))
            number = len(self.compiled)
            return (
                SimpleNamespace(
                    function=number,
                    packed_metadata=(num_warps, 1, 0),
                    run=lambda *given: self.relaunched.append(given),
                )
                if self._compiles
                else None
            )

        return launch


@pytest.fixture
def launch_module(monkeypatch):
    from tokamak.ops import triton_launch

    active = SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(triton_launch, "driver", SimpleNamespace(active=active))
    return triton_launch


def run(relaunch, x, *, count=3, stride=8, constant=16, num_warps=4, grid=(2, 1, 1)):
    relaunch(grid, (x,), (count,), (stride,), (constant,), num_warps=num_warps)


def test_what_was_compiled_is_launched_with_the_addresses_and_numbers_of_now(launch_module):
    kernel = Kernel()
    relaunch = launch_module.Relaunch(kernel)
    x, y = torch.zeros(16), torch.zeros(16)

    run(relaunch, x, count=3)
    run(relaunch, y, count=5, grid=(7, 2, 1))

    assert kernel.compiled == [((2, 1, 1), (x, 3, 8, 16), 4)]
    metadata = (4, 1, 0)
    assert kernel.relaunched == [
        (7, 2, 1, STREAM, 1, metadata, None, None, None, y.data_ptr(), 5, 8, 16)
    ]


@pytest.mark.parametrize(
    "other",
    [{"stride": 1}, {"constant": 32}, {"num_warps": 8}],
    ids=["stride", "constant", "warps"],
)
def test_numbers_it_is_specialised_for_ask_for_another_kernel(launch_module, other):
    kernel = Kernel()
    relaunch = launch_module.Relaunch(kernel)
    x = torch.zeros(16)

    for numbers in ({}, other, {}, other):
        run(relaunch, x, **numbers)

    assert len(kernel.compiled) == 2
    assert [given[4] for given in kernel.relaunched] == [1, 2]


@pytest.mark.parametrize(
    "other", [torch.zeros(16)[1:], torch.zeros(16).int()], ids=["alignment", "dtype"]
)
def test_a_tensor_unlike_the_first_asks_for_another_kernel(launch_module, other):
    kernel = Kernel()
    relaunch = launch_module.Relaunch(kernel)

    run(relaunch, torch.zeros(16))
    run(relaunch, other)

    assert len(kernel.compiled) == 2
    assert kernel.relaunched == []


def test_a_hook_is_told_of_every_launch(launch_module, monkeypatch):
    kernel = Kernel()
    relaunch = launch_module.Relaunch(kernel)
    x = torch.zeros(16)
    run(relaunch, x)
    hooks = launch_module.knobs.runtime.launch_enter_hook

    monkeypatch.setattr(hooks, "calls", [print])
    run(relaunch, x)

    assert len(kernel.compiled) == 2
    assert kernel.relaunched == []


def test_an_interpreted_kernel_is_asked_every_time(launch_module):
    kernel = Kernel(compiles=False)
    relaunch = launch_module.Relaunch(kernel)
    x = torch.zeros(16)

    run(relaunch, x)
    run(relaunch, x)

    assert len(kernel.compiled) == 2
