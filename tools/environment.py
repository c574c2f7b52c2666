"""Make or refresh a virtual environment that holds this project: `python tools/environment.py .venv cpu`.

Plain pip and venv, nothing to install before. The CPU build of torch comes first, pinned by constraints.txt: several
packages would otherwise pull the build with CUDA. A stamp in the environment says what it was made from, so that a
second call costs nothing until pyproject.toml, constraints.txt or this file change. All output goes to stderr.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
REACH_TIMEOUT_S = 5.0
ALONE = {"test": ("nemo-automodel",)}
"""By extra: packages that are installed without what they ask for, gigabytes that the parts in use never import."""
OLDEST_PYTHON = (3, 11)


def main(arguments: list[str]) -> int:
    """Make the environment named first, with the extras named after it."""
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(str(part) for part in OLDEST_PYTHON)
        return _fail(
            f"Python {wanted} or later is needed; {sys.executable} is {sys.version.split()[0]}. "
            f"Name another one: make PYTHON=python{wanted} ..."
        )
    if not arguments:
        return _fail("usage: python tools/environment.py FOLDER [EXTRA ...]")
    folder = (ROOT / arguments[0]).resolve()
    extras = arguments[1:]
    stamp = folder / ".made-from"
    wanted_stamp = fingerprint(extras)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted_stamp:
        return 0
    began_s = time.monotonic()
    make_environment(folder)
    install_torch(folder)
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    _say(f"installing tokamak [{', '.join(extras)}] into {folder.name}")
    pip(folder, "install", "--quiet", "--constraint", str(CONSTRAINTS), "--editable", target)
    alone = [f"{name}=={pinned(name)}" for extra in extras for name in ALONE.get(extra, ())]
    if alone:
        pip(folder, "install", "--quiet", "--no-deps", *alone)
    stamp.write_text(wanted_stamp, encoding="utf-8")
    _say(f"{folder.name} is ready after {time.monotonic() - began_s:.0f} s")
    return 0


def fingerprint(extras: list[str]) -> str:
    """What an environment is made from, as one text."""
    digest = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)):
        digest.update(part.read_bytes())
    # The folder and the Python are part of it: an environment does not survive a move of either.
    return f"{digest.hexdigest()} {','.join(extras)} {sys.version} {sys.prefix} {ROOT}\n"


def make_environment(folder: Path) -> None:
    """A virtual environment of the running Python; one made by another Python is replaced."""
    python = python_of(folder)
    if python.exists():
        asked = subprocess.run(
            [str(python), "-c", "import sys; print(sys.version)"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode == 0 and asked.stdout.strip() == sys.version.strip():
            return
        shutil.rmtree(folder)
    _say(f"making {folder.name} with Python {sys.version.split()[0]}")
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(folder)], stdout=sys.stderr, check=False
    )
    if made.returncode != 0:
        raise SystemExit(
            _fail(
                "python -m venv failed; on Debian and Ubuntu, `apt install python3-venv` brings it"
            )
        )


def install_torch(folder: Path) -> None:
    """The pinned torch, without CUDA wherever such a build is to be had."""
    version = pinned("torch")
    asked = subprocess.run(
        [str(python_of(folder)), "-c", "import importlib.metadata as m; print(m.version('torch'))"],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode == 0 and asked.stdout.split("+")[0].strip() == version:
        return
    _say(f"installing torch {version} for the CPU (about 200 MB)")
    wanted = f"torch=={version}"
    # A wheel that pip was told to look for in a folder (find-links) is taken before any download.
    at_hand = subprocess.run(
        _pip(folder, "install", "--quiet", "--no-index", "--no-deps", wanted),
        capture_output=True,
        check=False,
    )
    if at_hand.returncode == 0:
        return
    # The package index has CUDA builds alone for Linux; elsewhere its builds are for the CPU.
    if sys.platform == "linux" and _reachable(f"{CPU_INDEX}/torch/"):
        pip(folder, "install", "--quiet", "--no-deps", "--index-url", CPU_INDEX, wanted)
        return
    if sys.platform == "linux":
        _say(f"{CPU_INDEX} does not answer; the package index has torch with CUDA (several GB)")
    pip(folder, "install", "--quiet", "--constraint", str(CONSTRAINTS), wanted)


def pinned(package: str) -> str:
    """The version constraints.txt gives a package."""
    match = re.search(
        rf"^{re.escape(package)}==(\S+)", CONSTRAINTS.read_text(encoding="utf-8"), re.M
    )
    assert match is not None, f"constraints.txt does not pin {package}"
    return match[1]


def pip(folder: Path, *arguments: str) -> None:
    """Run an environment's pip; ends this program when it fails."""
    done = subprocess.run(_pip(folder, *arguments), stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise SystemExit(_fail(f"pip {arguments[0]} failed; its output above has the reason"))


def python_of(folder: Path) -> Path:
    """The Python of a virtual environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _pip(folder: Path, *arguments: str) -> list[str]:
    return [str(python_of(folder)), "-m", "pip", "--disable-pip-version-check", *arguments]


def _reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=REACH_TIMEOUT_S) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(text: str) -> int:
    _say(f"error: {text}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
