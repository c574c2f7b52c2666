"""Where a tokenizer that took work to make is kept, and when it is used again.

One file: a line that says which model file it was made of and the ids of special tokens, then
tokenizer.json's text. It lies beside the model, or in the cache folder where that cannot be written.
A model file of another size or time has another first line, so an old tokenizer is never used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from tokamak.checkpoint.cache_folder import cache_folder
from tokamak.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MADE_BY = 1
"""Raised when the same model file would give another tokenizer."""

SUFFIX = ".tokenizer.json"


def cached_tokenizer(path: Path, make: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer of the model file `path`: kept from before, or made now and kept."""
    if not path.is_file():
        return make()
    source = _identity(path)
    places = _places(path)
    for place in places:
        kept = _read(place, source)
        if kept is not None:
            return kept
    made = make()
    header = {
        "source": source,
        "bos_id": made.bos_id,
        "eos_ids": sorted(made.eos_ids),
        "vocab_tokens": made.vocab_tokens,
    }
    for place in places:
        try:
            _write(place, header, made.to_json())
        except OSError as error:
            log.debug("%s cannot be written: %s", place, error)
        else:
            break
    return made


def _identity(path: Path) -> dict[str, Any]:
    """What must not have changed since the tokenizer was made."""
    stat = path.stat()
    return {
        "made_by": MADE_BY,
        "tokenizers": tokenizers.__version__,
        "file_bytes": stat.st_size,
        "modified_ns": stat.st_mtime_ns,
    }


def _places(path: Path) -> tuple[Path, Path]:
    """Beside the model, then in the cache folder under a name of the model's whole path."""
    digest = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    kept = cache_folder() / "tokenizers" / f"{path.name}.{digest}{SUFFIX}"
    return path.with_name(path.name + SUFFIX), kept


def _read(place: Path, source: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer kept at `place`, if it was made of the same file."""
    try:
        first, _, text = place.read_text(encoding="utf-8").partition("\n")
        header = json.loads(first)
        if header["source"] != source:
            return None
        backend = tokenizers.Tokenizer.from_str(text)
        return Tokenizer(
            backend,
            bos_id=header["bos_id"],
            eos_ids=header["eos_ids"],
            vocab_tokens=header["vocab_tokens"],
        )
    except OSError:
        return None
    # A kept file can be damaged in any way, and the library raises bare exceptions; it is made again.
    except Exception as error:
        log.warning("%s is damaged and is made again: %s", place, error)
        return None


def _write(place: Path, header: dict[str, Any], text: str) -> None:
    """Write all or nothing, so that another process never sees half a file."""
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(header) + "\n" + text)
        os.chmod(name, 0o644)
        os.replace(name, place)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
