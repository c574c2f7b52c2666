"""What is recorded follows the device, the arithmetic and what was asked; contradictions are one line."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.support.configs import CPU, a_config
from tokamak.config.settle_graphs import compiled_kernels, sizes_text
from tokamak.device.facts import DeviceFacts
from tokamak.errors import OptionError
from tokamak.ops.jit.available import fits

GPU = dataclasses.replace(CPU, vendor="nvidia", arch="sm90", name="a GPU")


def why(name: str, *, facts: DeviceFacts = CPU, **options: object) -> str:
    config = a_config(facts=facts, **options)
    return next(line.why for line in config.reasons if line.field == name)


def test_a_cpu_with_compiled_kernels_records_every_request_size_on_demand() -> None:
    graphs = a_config(max_num_seqs=5).graphs

    assert (graphs.when, graphs.backend) == ("on-demand", "sim")
    assert graphs.request_sizes == (1, 2, 3, 4, 5)
    assert graphs.token_sizes == ()
    assert "no padding on a CPU" in why("req_graph_sizes")
    assert "arithmetic" in why("token_graph_sizes")


def test_a_gpu_records_the_default_sizes_while_it_serves() -> None:
    graphs = a_config(facts=GPU).graphs

    assert (graphs.when, graphs.backend) == ("serving", "cuda")
    assert (graphs.request_sizes, graphs.token_sizes) == (None, None)


def test_on_a_cpu_recordings_are_kept_where_they_replay_faster_and_the_reason_says_so() -> None:
    for dtype in ("fp32", "bf16"):
        graphs = a_config(dtype=dtype).graphs

        assert (graphs.when, graphs.backend) == ("on-demand", "sim")
        assert "replay faster" in why("graphs", dtype=dtype)


def test_a_cpu_without_compiled_kernels_is_not_recorded() -> None:
    plain = dataclasses.replace(CPU, libraries=frozenset())

    assert a_config(facts=plain).graphs.when == "off"
    assert "llvmlite" in why("graphs", facts=plain)


@pytest.mark.parametrize("vendor", ["cpu", "nvidia"])
def test_settling_and_the_compiler_agree_on_who_has_compiled_kernels(vendor: str) -> None:
    for features, libraries in itertools.product(
        [set(), {"avx2"}, {"avx512f", "fma"}, {"asimd"}, {"fma"}],
        [set(), {"llvmlite"}, {"triton"}],
    ):
        facts = dataclasses.replace(
            CPU, vendor=vendor, features=frozenset(features), libraries=frozenset(libraries)
        )
        assert compiled_kernels(facts) == fits(facts), facts


@pytest.mark.parametrize(
    ("asked", "when", "backend", "request_sizes", "token_sizes"),
    [
        ({"graphs": "startup"}, "startup", "sim", (1, 2, 3), ()),
        ({"graphs": "startup", "dtype": "bf16"}, "startup", "sim", (1, 2, 3), ()),
        ({"graph_backend": "sim", "dtype": "bf16"}, "on-demand", "sim", (1, 2, 3), ()),
        ({"graph_backend": "none"}, "off", "none", (), ()),
        ({"graphs": "off"}, "off", "none", (), ()),
        ({"req_graph_sizes": "3,1,3"}, "on-demand", "sim", (1, 3), ()),
        ({"req_graph_sizes": "2", "dtype": "bf16"}, "on-demand", "sim", (2,), ()),
        ({"req_graph_sizes": ""}, "off", "none", (), ()),
        (
            {"req_graph_sizes": (), "token_graph_sizes": [128, 64]},
            "on-demand", "sim", (), (64, 128),
        ),
        ({"token_graph_max": 256}, "on-demand", "sim", (1, 2, 3), None),
        ({"graphs": "on-demand", "verify_graphs": True}, "on-demand", "sim", (1, 2, 3), ()),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_asked_for_is_recorded(
    asked: dict[str, object], when: str, backend: str, request_sizes: object, token_sizes: object
) -> None:
    graphs = a_config(max_num_seqs=3, **asked).graphs

    assert (graphs.when, graphs.backend) == (when, backend)
    assert (graphs.request_sizes, graphs.token_sizes) == (request_sizes, token_sizes)


def test_how_graphs_are_checked_is_kept() -> None:
    graphs = a_config(
        token_graph_sizes="64",
        token_graph_eager_pad=True,
        graph_pools="per_bucket",
        graphs_allow_missing_bucket=True,
        verify_graphs=True,
        verify_graphs_rate=0.25,
        poison_pad_rows=True,
    ).graphs

    assert graphs.eager_pad
    assert graphs.pools == "per_bucket"
    assert graphs.allow_missing_bucket
    assert graphs.verify
    assert graphs.verify_rate == 0.25
    assert graphs.poison_pads


@pytest.mark.parametrize(
    ("asked", "named", "works"),
    [
        (
            {"graphs": "off", "graph_backend": "sim"},
            ("graphs is off", "graph_backend is sim"),
            {"graphs": "startup", "graph_backend": "sim"},
        ),
        (
            {"graphs": "startup", "graph_backend": "none"},
            ("graphs is startup", "graph_backend is none"),
            {"graphs": "off", "graph_backend": "none"},
        ),
        (
            {"graphs": "on-demand", "graph_backend": "none"},
            ("graphs is on-demand", "graph_backend is none"),
            {"graphs": "on-demand"},
        ),
        (
            {"graph_backend": "cuda"},
            ("graph_backend is cuda", "the device is a CPU"),
            {"graph_backend": "sim"},
        ),
        (
            {"graphs": "off", "verify_graphs": True},
            ("verify_graphs is true", "graphs is off"),
            {"graphs": "startup", "verify_graphs": True},
        ),
        (
            {"graph_backend": "none", "verify_graphs": True},
            ("verify_graphs is true", "graph_backend is none"),
            {"graphs": "startup", "verify_graphs": True},
        ),
        (
            {"graphs": "off", "verify_graphs_rate": 0.1},
            ("verify_graphs_rate is 0.1", "graphs is off"),
            {"graphs": "startup", "verify_graphs_rate": 0.1},
        ),
        (
            {"graphs": "off", "req_graph_sizes": "1,2"},
            ("req_graph_sizes is 1, 2", "graphs is off"),
            {"graphs": "off", "req_graph_sizes": ""},
        ),
        (
            {"graph_backend": "none", "token_graph_sizes": "64"},
            ("token_graph_sizes is 64", "graph_backend is none"),
            {"token_graph_sizes": "64"},
        ),
        (
            {"graphs": "off", "token_graph_eager_pad": True},
            ("token_graph_eager_pad is true", "graphs is off"),
            {"graphs": "startup", "token_graph_sizes": "64", "token_graph_eager_pad": True},
        ),
        (
            {"token_graph_sizes": "", "token_graph_eager_pad": True},
            ("token_graph_eager_pad is true", "token_graph_sizes is empty"),
            {"token_graph_sizes": "512", "token_graph_eager_pad": True},
        ),
        (
            {"token_graph_max": 128, "token_graph_sizes": "64,256"},
            ("token_graph_max is 128", "token_graph_sizes is 64, 256"),
            {"token_graph_sizes": "64,256"},
        ),
        (
            {"req_graph_sizes": "1,64", "max_num_seqs": 8},
            ("req_graph_sizes has 64", "max_num_seqs is 8"),
            {"req_graph_sizes": "1,8", "max_num_seqs": 8},
        ),
        (
            {"token_graph_sizes": "1024"},
            ("token_graph_sizes has 1024", "max_num_batched_tokens is 512"),
            {"token_graph_sizes": "512"},
        ),
        (
            {"req_graph_sizes": (0, 1)},
            ("req_graph_sizes has 0", "1 to 32"),
            {"req_graph_sizes": (1,)},
        ),
        (
            {"graphs": "startup", "req_graph_sizes": "", "token_graph_sizes": ""},
            ("graphs is startup", "no size is left"),
            {"graphs": "off", "req_graph_sizes": "", "token_graph_sizes": ""},
        ),
        (
            {"graphs": "on-demand", "req_graph_sizes": ""},
            ("graphs is on-demand", "no size is left"),
            {"graphs": "on-demand", "req_graph_sizes": "", "token_graph_sizes": "64"},
        ),
    ],
    ids=str,
)  # fmt: skip
def test_graph_options_that_contradict_each_other_are_one_line_and_the_hint_works(
    asked: dict[str, object], named: tuple[str, str], works: dict[str, object]
) -> None:
    with pytest.raises(OptionError) as caught:
        a_config(**asked)

    assert all(part in str(caught.value) for part in named), str(caught.value)
    assert "hint:" in str(caught.value)
    assert "\n" not in str(caught.value)
    a_config(**works)


def test_the_recorder_of_a_cpu_is_refused_on_a_gpu() -> None:
    with pytest.raises(OptionError, match="graph_backend is sim"):
        a_config(facts=GPU, graph_backend="sim")

    assert a_config(facts=GPU, graph_backend="cuda").graphs.backend == "cuda"


@pytest.mark.parametrize(
    ("sizes", "text"),
    [(None, "default rule"), ((), "none"), ((1, 2, 3), "1 to 3"), ((1, 4), "1, 4"), ((64,), "64")],
)
def test_sizes_read_well(sizes: tuple[int, ...] | None, text: str) -> None:
    assert sizes_text(sizes) == text
