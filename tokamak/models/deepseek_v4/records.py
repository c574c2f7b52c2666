"""Which rows V4.1 was trained to keep in narrow formats, and its caches as records of them.

Every number that has been through a format is kept by its records, so that caches of records give back what caches of
rounded rows do. V4's rows have not: a model of the family that does not round what it caches keeps numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokamak.cache.sub_cache import SubCache
from tokamak.errors import OptionError
from tokamak.layers.build import Build
from tokamak.ops.records import FP8, MXFP4, NVFP4, KVFormat

NATIVE = "native"
"""What `kv_cache_dtype` calls these formats."""

FORMS = {"window": FP8, "late_window": FP8, "entries": NVFP4, "index_keys": MXFP4}
"""By what a sub-cache's name begins with."""


def is_packed(build: Build, architecture: str, *, rounds: bool) -> bool:
    """Whether caches are to be records. rounds: whether rows go through these formats before they are cached.

    Raises:
        OptionError: they do not, and records would lose digits.
    """
    packed = build.cache_dtype == NATIVE
    if packed and not rounds:
        raise OptionError(
            f"kv_cache_dtype is {NATIVE}, but this {architecture} does not round what it caches: packed rows "
            "would lose digits",
            hint="use kv_cache_dtype=auto, or leave it out",
        )
    return packed


def form_of(sub_cache: str) -> KVFormat | None:
    """The format of a sub-cache's rows by its name; None where they stay numbers."""
    return next((form for name, form in FORMS.items() if sub_cache.startswith(name)), None)


def in_records(sub_caches: Sequence[SubCache]) -> list[SubCache]:
    """The same sub-caches, those with a format as bytes."""
    found: list[SubCache] = []
    for sub_cache in sub_caches:
        form = form_of(sub_cache.name)
        if form is not None:
            width = form.bytes_per_row(sub_cache.width)
            sub_cache = replace(sub_cache, width=width, dtype="uint8")
        found.append(sub_cache)
    return found
