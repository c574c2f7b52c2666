"""How a settled step runs the model: eagerly, or by one of the two kinds of graph."""

from __future__ import annotations

from torch import Tensor

from tokamak.core.inputs import StepInputs
from tokamak.core.plan import Mode, StepShape
from tokamak.graphs.replay import DecodeReplay
from tokamak.layers.model import Model


class Forward:
    """Runs the model over a step's inputs."""

    def __init__(self, model: Model) -> None:
        self._eager = DecodeReplay(model)

    def run(self, inputs: StepInputs, shape: StepShape) -> Tensor:
        """Hidden states of all running token rows, [tokens, width]."""
        assert shape.mode is Mode.EAGER, f"no graph is recorded, and the shape says {shape.mode}"
        return self._eager.run(inputs)
