"""Do V4 and V4.1 give the same scores where every op is a Triton kernel, as on a GPU? Kernels are interpreted on the CPU.

Ops have tests of their own; this is about what layers hand to kernels, and ops that join several where there is one.
"""

import importlib.util

import pytest

from tests.support.interpreted_model import MODELS, interpreted_model

pytestmark = [
    pytest.mark.vendor("triton"),
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]
OTHERS = {"linear": "device", "head": "device", "scaled_experts_limited": "reference"}
"""Choices that are no kernel of Triton's on a GPU without 8-bit products."""


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_kernels_scores_like_one_of_references(name):
    gap, backends = interpreted_model(name)

    assert gap < 1e-4
    assert {"rotate_write", "collapse_norm", "sparse_attention"} <= backends.keys()
    assert {op: each for op, each in backends.items() if each != "triton"} == OTHERS
