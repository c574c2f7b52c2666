"""Do backends keep their op's signature, and does a choice say why?"""

import importlib.util
import inspect
from dataclasses import replace

import pytest

from tokamak.device.facts import cpu_facts
from tokamak.errors import NoBackendError
from tokamak.ops.load import load_backends
from tokamak.ops.registry import OPS, REFERENCE, Op, op, takes_own

HAS_TRITON = importlib.util.find_spec("triton") is not None
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


@pytest.fixture
def a_cached_op():
    def read(x: int) -> int:
        return x

    op = Op(read, recordable=True)
    op.backend("own", fits=lambda facts: True, takes=takes_own)(read)
    op.backend("any", fits=lambda facts: True)(read)
    return op


def test_a_backend_that_does_not_take_the_caches_is_passed_over_by_name(a_cached_op):
    _, own = a_cached_op.bind(cpu_facts())
    _, other = a_cached_op.bind(cpu_facts(), cache_dtype="fp8")

    assert own.backend == "own"
    assert "fp8" not in own.why
    assert other.backend == "any"
    assert other.why.endswith("; caches in fp8 are not for own")


def test_a_backend_that_does_not_take_the_caches_is_refused_where_it_was_asked_for(a_cached_op):
    with pytest.raises(NoBackendError, match=r"'own' for cpu .*; caches in fp8 are not for own"):
        a_cached_op.bind(cpu_facts(), prefer="own", cache_dtype="fp8")


NVIDIA = replace(cpu_facts(), vendor="nvidia", libraries=frozenset({"triton"}))
AMD = replace(NVIDIA, vendor="amd", arch="gfx942")


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize(
    ("facts", "attention", "rotation"),
    [
        (replace(NVIDIA, arch="sm90"), "triton_sm90", "triton"),
        (replace(NVIDIA, arch="sm89"), "triton", "triton"),
        (replace(NVIDIA, arch="sm80"), "padded", REFERENCE),
        (AMD, "triton", "triton"),
    ],
    ids=lambda value: getattr(value, "arch", value),
)
def test_fp8_caches_have_kernels_where_a_chip_converts_its_numbers(facts, attention, rotation):
    chosen = {
        name: OPS[name].bind(facts, cache_dtype="fp8")[1].backend
        for name in ("paged_attention", "rotate_and_cache", "rotate_cache_attend")
    }

    joined = REFERENCE if attention == "padded" else attention
    assert chosen == {
        "paged_attention": attention, "rotate_and_cache": rotation, "rotate_cache_attend": joined,
    }  # fmt: skip


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize("facts", [NVIDIA, AMD], ids=lambda facts: facts.arch)
def test_records_are_for_the_kernels_that_read_them_alone(facts):
    names = ("select_entries", "sparse_attention", "write_records")
    of_numbers = ("paged_attention", "rotate_and_cache", "rotate_cache_attend")

    chosen = {name: OPS[name].bind(facts, cache_dtype="native")[1] for name in names + of_numbers}

    assert {chosen[name].backend for name in names} == {"triton"}
    assert {chosen[name].backend for name in of_numbers} == {REFERENCE}
    assert all("caches in native are not for triton" in chosen[name].why for name in of_numbers)


def test_compiled_kernels_of_a_cpu_leave_fp8_caches_to_others_and_say_so():
    facts = replace(cpu_facts(), libraries=frozenset({"llvmlite"}), features=frozenset({"avx2"}))
    if "llvm" not in {backend.name for backend in OPS["rotate_and_cache"].backends}:
        pytest.skip("llvmlite is not installed")

    choices = [
        OPS[name].bind(facts, cache_dtype="fp8")[1]
        for name in ("paged_attention", "rotate_and_cache")
    ]

    assert [choice.backend for choice in choices] == ["padded", REFERENCE]
    assert all(choice.why.endswith("caches in fp8 are not for llvm") for choice in choices)
    assert all(choice.recordable for choice in choices)
