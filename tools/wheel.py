"""Does the wheel work where nothing else is? It is built, installed in an empty environment and tried elsewhere.

An editable install hides a file that the wheel lacks; this finds it. Every module is imported and the commands that
need no model are run, from a folder that has no checkout in it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import environment

IMPORT_ALL = """
import importlib, os, pkgutil
import tokamak
assert "site-packages" in tokamak.__file__, tokamak.__file__
assert os.path.isfile(os.path.join(os.path.dirname(tokamak.__file__), "py.typed"))
names = [m.name for m in pkgutil.walk_packages(tokamak.__path__, "tokamak.") if not m.name.endswith("__main__")]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A backend of an optional library is imported where its library is; our own modules always.
        if (error.name or "").partition(".")[0] in ("tokamak",) or ".ops." not in name:
            raise
print(len(names), "modules import")
"""

COMMANDS = (
    ("--version",),
    ("--help",),
    ("chat", "--help"),
    ("serve", "--help"),
    ("bench", "serve", "--help"),
    ("doctor", "--no-model"),
)


def main() -> int:
    """Build, install, try; the exit status is 0 when all works."""
    with tempfile.TemporaryDirectory(prefix="tokamak-wheel-") as name:
        folder = Path(name)
        venv = folder / "venv"
        print("building the wheel", file=sys.stderr)
        _run(
            [
                *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"),
                *("--no-deps", "--wheel-dir", str(folder), str(environment.ROOT)),
            ],
            folder,
        )
        (wheel,) = folder.glob("tokamak-*.whl")
        environment.make_environment(venv)
        environment.install_torch(venv)
        environment.pip(
            venv, "install", "--quiet", "--constraint", str(environment.CONSTRAINTS), str(wheel)
        )
        _run([str(environment.python_of(venv)), "-c", IMPORT_ALL], folder)
        for command in COMMANDS:
            _run([str(environment.python_of(venv).parent / "tokamak"), *command], folder)
    print(f"the wheel works in an empty environment: {len(COMMANDS)} commands ran")
    return 0


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout + done.stderr, file=sys.stderr)
        raise SystemExit(f"error: {' '.join(command[:4])} exited with {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
