"""Do backends keep their op's signature, and does a choice say why?"""

import inspect

import pytest

from tokamak.device.facts import cpu_facts
from tokamak.errors import NoBackendError
from tokamak.ops.load import load_backends
from tokamak.ops.registry import OPS, REFERENCE, Op, op

load_backends()


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_backends_take_the_arguments_of_their_reference(op):
    expected = list(inspect.signature(op.reference).parameters)

    for backend in op.backends:
        assert list(inspect.signature(backend.call).parameters) == expected, backend.name


@pytest.fixture
def an_op():
    def triple(x: int) -> int:
        return 3 * x

    op = Op(triple, recordable=True)

    @op.backend("absent", fits=lambda facts: False)
    def _absent(x: int) -> int:
        return -1

    @op.backend("here", fits=lambda facts: True)
    def _here(x: int) -> int:
        return x + x + x

    return op


def test_the_first_backend_that_fits_is_bound(an_op):
    call, choice = an_op.bind(cpu_facts())

    assert call(2) == 6
    assert choice.backend == "here"
    assert choice.why.startswith("first that fits cpu")


def test_the_reference_can_be_asked_for(an_op):
    call, choice = an_op.bind(cpu_facts(), prefer=REFERENCE)

    assert call is an_op.reference
    assert choice.why == "asked for"


@pytest.mark.parametrize("name", ["absent", "nowhere"])
def test_a_backend_that_cannot_run_is_refused_by_name(an_op, name):
    with pytest.raises(NoBackendError, match=name) as error:
        an_op.bind(cpu_facts(), prefer=name)

    assert "here" in str(error.value.hint)


def test_a_choice_says_whether_a_recording_of_it_holds():
    @op(recordable=False)
    def reads_the_host(x: int) -> int:
        return x

    try:
        _, choice = reads_the_host.bind(cpu_facts())
        _, plain = OPS["silu_mul"].bind(cpu_facts())
    finally:
        del OPS["reads_the_host"]

    assert not choice.recordable
    assert plain.recordable


def test_a_backend_can_be_preferred_to_the_one_it_is_made_of(an_op):
    @an_op.backend("sooner", fits=lambda facts: True, before="here")
    def _sooner(x: int) -> int:
        return 3 * x

    _, choice = an_op.bind(cpu_facts())

    assert choice.backend == "sooner"
    assert [backend.name for backend in an_op.backends] == ["absent", "sooner", "here"]
