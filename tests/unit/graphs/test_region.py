"""What can be declared a region, and what does a manifest say of a forward that met others?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokamak.core.context import current
from tokamak.errors import GraphError, NoContext, RegionMismatch
from tokamak.graphs.region import REGIONS, Manifest, eager_region


@eager_region("test_scale", outs=("out", "count"))
def scale_rows(
    x: Tensor, out: Tensor, count: Tensor, by: float, shift: int, flip: bool, name: str
) -> None:
    """Every kind of argument a region may have."""
    out.copy_((x * by + shift) * (-1 if flip else 1))
    count.fill_(len(name))


@eager_region("test_context", outs=())
def read_context(x: Tensor) -> None:
    """Reads the step."""
    current()


def plain(x: Tensor, out: Tensor) -> None:
    """A body that may be declared."""


def returning(x: Tensor) -> Tensor:
    """Returns a tensor of its own."""
    return x + 1


class Layer:
    def method(self, x: Tensor, out: Tensor) -> None:
        """A method."""


def test_a_region_is_an_op_that_writes_into_its_outs():
    x, out, count = torch.ones(2, 3), torch.empty(2, 3), torch.zeros(1)

    scale_rows(x, out, count, 2.0, 1, True, "abc")

    assert torch.equal(out, torch.full((2, 3), -3.0))
    assert count.item() == 3
    schema = str(torch.ops.tokamak.test_scale.default._schema)
    assert "Tensor(a1!) out, Tensor(a2!) count" in schema
    assert REGIONS[torch.ops.tokamak.test_scale.default] is scale_rows


def test_the_op_is_what_a_call_runs_even_by_name():
    x, out, count = torch.ones(1), torch.empty(1), torch.zeros(1)

    torch.ops.tokamak.test_scale(x, out, count, 3.0, 0, False, "")

    assert out.item() == 3.0


def test_a_tracer_sees_a_region_that_computes_nothing():
    with torch._subclasses.FakeTensorMode():
        x, out, count = torch.ones(2, 3), torch.empty(2, 3), torch.zeros(1)

        scale_rows(x, out, count, 2.0, 1, True, "abc")

    assert out.shape == (2, 3)


def test_a_body_that_needs_the_step_fails_outside_of_one():
    with pytest.raises(NoContext):
        read_context(torch.ones(1))


@pytest.mark.parametrize(
    ("name", "outs", "body", "message"),
    [
        ("test_method", ("out",), Layer.method, "made of Layer.method, a method or a nested"),
        ("test_return", (), returning, "'test_return' returns 'Tensor'"),
        ("test_out", ("result",), plain, "has no parameter 'result', named in its outs"),
        ("test_scale", ("out",), plain, "there is an eager region 'test_scale' already"),
    ],
)
def test_what_cannot_be_a_region_is_refused_with_the_reason(name, outs, body, message):
    with pytest.raises(GraphError, match=message):
        eager_region(name, outs=outs)(body)


def test_a_nested_function_is_refused():
    def inner(x: Tensor, out: Tensor) -> None:
        """Knows more than its arguments."""

    with pytest.raises(GraphError, match="a method or a nested function"):
        eager_region("test_inner")(inner)


def test_a_manifest_counts_runs_of_a_region():
    assert Manifest.of("begin", ("attention", 2)).names == ("begin", "attention", "attention")


@pytest.mark.parametrize(
    ("met", "message"),
    [
        (("a", "b"), "region 2 should be 'b' and is the end; met a 1 of 1, b 1 of 2"),
        (("a", "b", "b", "a"), "region 3 should be the end and is 'a'; met a 2 of 1, b 2 of 2"),
        (("a", "c", "b"), "region 1 should be 'b' and is 'c'; met a 1 of 1, b 1 of 2, c 1 of 0"),
        ((), "region 0 should be 'a' and is the end; met a 0 of 1, b 0 of 2"),
    ],
)
def test_the_first_difference_from_a_manifest_is_named(met, message):
    manifest = Manifest.of("a", ("b", 2))

    with pytest.raises(RegionMismatch, match=f"decode: {message}"):
        manifest.compare(met, graph="decode")


def test_a_forward_as_declared_passes():
    Manifest.of("a", ("b", 2)).compare(["a", "b", "b"], graph="decode")
