"""How far are V4 and V4.1 models whose ops are Triton's from those whose ops are the references?

Run as a process of its own with TRITON_INTERPRET=1: kernels are interpreted on the CPU, in a model that is built for a
GPU. Prints the difference of scores and which backends ran. Products of dense layers, which take most of the time and
have tests of their own, are PyTorch's.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.support.configs import GPU
from tests.support.interpreted import mend_interpreter, printed_by
from tests.support.steps import ModelDriver, a_build, a_model
from tests.support.tiny_v4 import SMALL, a_v4_1, v4_config, weights_of
from tokamak.layers.build import Build
from tokamak.layers.model import Model
from tokamak.ops.load import load_backends

V4_1 = {
    **SMALL,
    "vocab_size": 64,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 2, 1, 1],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "candidate_source_layer_id": 2,
    "hc_sinkhorn_iters": 2,
}
"""One layer of every kind: a window alone, a maker of entries of two tokens, one of single tokens, and a reader."""
V4 = {
    "vocab_size": 64,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 8],
    "num_hash_layers": 1,
    "hc_sinkhorn_iters": 2,
}
PARTS = ([5, 9, 33, 2, 7, 11, 30], [20])
"""Tokens of a prompt and of a decode step, with which groups of all sizes end."""


def _v4(build: Build) -> Model:
    config = v4_config(**V4)
    return a_model(config, weights_of(config), build)


MODELS: dict[str, Callable[[Build], Model]] = {
    "V4.1": lambda build: a_v4_1(build, **V4_1),
    "V4": _v4,
}


def interpreted_model(name: str) -> tuple[float, dict[str, str]]:
    """The largest difference of scores relative to their spread, and the backend of each op."""
    gap, backends = printed_by("interpreted_model", name)
    return gap, backends


def scores(model: Model) -> Tensor:
    """Of all tokens, in float32."""
    driver = ModelDriver(model, block_tokens=8)
    return torch.cat([driver.step({"only": part})["only"] for part in PARTS])


def main() -> None:
    """Compare and print."""
    make = MODELS[sys.argv[1]]
    mend_interpreter()
    load_backends()
    few_rows: Any = importlib.import_module("tokamak.ops.linear.triton_few")
    few_rows.suits = lambda x, weight: False
    # Kernels of Hopper alone have instructions that nobody interprets.
    build = replace(a_build(), facts=replace(GPU, arch="sm80"), exact=False)
    with torch.inference_mode():
        found, expected = scores(make(build)), scores(make(a_build()))
    gap = (found - expected).abs().max() / expected.std()
    backends = {name: choice.backend for name, choice in build.choices.items()}
    sys.stdout.write(json.dumps([gap.item(), backends]) + "\n")


if __name__ == "__main__":
    main()
