"""Are files and functions that grew too long found, and told what to do?"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.fixture(scope="module")
def sizes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sizes", TOOLS / "sizes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "tokamak" / "engine").mkdir(parents=True)
    return tmp_path / "tokamak"


def function(name: str, lines: int, decorator: str = "") -> str:
    return f"{decorator}def {name}():\n" + "    pass\n" * (lines - 1)


def test_a_file_is_too_long_from_the_first_line_above_the_limit(
    sizes: ModuleType, package: Path
) -> None:
    (package / "engine" / "long.py").write_text("x = 1\n" * 401)
    (package / "engine" / "full.py").write_text("x = 1\n" * 400)

    assert sizes.problems(package) == [
        "tokamak/engine/long.py has 401 lines; a file has at most 400: "
        "move what answers another question to a file of its own"
    ]


def test_a_function_is_too_long_wherever_it_is_defined(sizes: ModuleType, package: Path) -> None:
    (package / "plain.py").write_text(function("full", 120) + function("long", 121))
    (package / "method.py").write_text(
        f"class A:\n    async {function('run', 121)}".replace("    pass", "        pass")
    )

    assert sizes.problems(package) == [
        "tokamak/method.py:2 run has 121 lines; a function has at most 120: "
        "give its steps names, as functions",
        "tokamak/plain.py:121 long has 121 lines; a function has at most 120: "
        "give its steps names, as functions",
    ]


@pytest.mark.parametrize(
    "decorator", ["@triton.jit\n", "@triton.jit(do_not_specialize=['n'])\n", "@gluon.jit\n"]
)
def test_a_kernel_may_be_long_and_other_decorated_functions_may_not(
    sizes: ModuleType, package: Path, decorator: str
) -> None:
    (package / "kernel.py").write_text(function("_kernel", 121, decorator))
    (package / "cached.py").write_text(function("made", 121, "@lru_cache(maxsize=1)\n"))

    (problem,) = sizes.problems(package)

    assert problem.startswith("tokamak/cached.py:2 made has 121 lines")


def test_the_package_keeps_the_limits(
    sizes: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    code = sizes.main(["--check"])

    assert capsys.readouterr().err == ""
    assert code == 0
