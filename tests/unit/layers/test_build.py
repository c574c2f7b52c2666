"""When does a build bind an op that does at once what other ops do, and what do caches of a format change?"""

import pytest

from tests.support.steps import a_build
from tokamak.errors import NoBackendError
from tokamak.ops.registry import Op, takes_own


def first() -> str:
    return "first"


def second() -> str:
    return "second"


def both() -> str:
    return "first and second"


def ops(*, kernel: bool):
    """Two ops and the one that joins them, with a kernel for this machine or without."""
    parts = tuple(Op(reference, recordable=True) for reference in (first, second))
    joined = Op(both, recordable=False)
    joined.backend("fast", fits=lambda facts: kernel and facts.vendor == "cpu")(lambda: "fast")
    return joined, parts


def test_a_kernel_of_the_joined_op_is_bound_and_noted():
    build, (joined, parts) = a_build(), ops(kernel=True)

    call = build.bind_joined(joined, parts, live=True)

    assert call is not None
    assert call() == "fast"
    assert build.choices["both"].backend == "fast"
    assert build.live == {"both"}


def test_without_a_kernel_nothing_is_bound_and_no_recording_is_refused():
    build, (joined, parts) = a_build(), ops(kernel=False)

    assert build.bind_joined(joined, parts) is None
    assert build.choices == {}
    assert build.unrecordable(token_graph=False) == ()


def test_a_backend_that_was_asked_for_a_part_is_not_passed_over():
    build, (joined, parts) = a_build(prefer={"second": "reference"}), ops(kernel=True)

    assert build.bind_joined(joined, parts) is None


def test_the_reference_of_the_joined_op_is_bound_where_it_was_asked_for():
    build, (joined, parts) = a_build(prefer={"both": "reference"}), ops(kernel=True)

    call = build.bind_joined(joined, parts)

    assert call is not None
    assert call() == "first and second"


def test_a_backend_of_the_joined_op_that_does_not_fit_is_refused():
    build, (joined, parts) = a_build(prefer={"both": "fast"}), ops(kernel=False)

    with pytest.raises(NoBackendError, match="both"):
        build.bind_joined(joined, parts)


def test_a_kernel_that_does_not_take_the_caches_is_not_bound():
    joined, parts = ops(kernel=False)
    joined.backend("own", fits=lambda facts: True, takes=takes_own)(lambda: "own")
    own, other = a_build(), a_build(cache_dtype="fp8")

    assert own.cache_dtype == "float32"
    assert own.bind_joined(joined, parts) is not None
    assert other.bind_joined(joined, parts) is None
    other.bind(joined)
    assert "caches in fp8 are not for own" in other.choices["both"].why
