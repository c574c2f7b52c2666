"""What safetensors files hold: names, shapes, formats and places of tensors. No tensor is read.

Everything a later read relies on is checked here: the index and the files agree, no tensor is in two
places, and every byte range lies in its file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from tokamak.checkpoint.entry import Format, TensorEntry, check_range
from tokamak.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

log = logging.getLogger(__name__)

SINGLE = "model.safetensors"

INDEX = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

DTYPES: dict[str, Format] = {
    name: Format(name, 1, size)
    for size, names in {
        8: ("F64", "I64", "U64", "C64"),
        4: ("F32", "I32", "U32"),
        2: ("F16", "BF16", "I16", "U16"),
        1: ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
    }.items()
    for name in names
}


def find_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of a folder's safetensors files, by name; empty if it has no such file.

    Raises:
        CheckpointError: a file is missing, truncated, or contradicts the index or another file.
        UnsupportedModelError: weights are there, but in no format we read.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index, files)
    if not files:
        others = sorted([*folder.glob("*.bin"), *folder.glob("*.pth"), *folder.glob("*.pt")])
        if others:
            raise UnsupportedModelError(
                f"{folder} has weights only as {others[0].name}, which can run code when it is read",
                hint="save the model as safetensors first",
            )
        return {}
    single = folder / SINGLE
    if single not in files and len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise CheckpointError(
            f"{folder} has {len(files)} safetensors files ({names}) and no {INDEX} that says which "
            "tensor is where"
        )
    chosen = single if single in files else files[0]
    _warn_of_extra([file for file in files if file != chosen], chosen.name)
    return {entry.name: entry for entry in read_header(chosen)}


def read_header(path: Path) -> Iterator[TensorEntry]:
    """The tensors of one file, in its order.

    Raises:
        ModelNotFoundError: there is no such file.
        CheckpointError: the file is truncated, has bytes no tensor covers, or its header is not valid.
        UnsupportedModelError: a tensor has a dtype that is not known.
    """
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or 8 + header_bytes > file_bytes or header_bytes > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path} is truncated or no safetensors file: it has {file_bytes} bytes and its "
                    f"header says {header_bytes}",
                    hint="fetch or copy the file again",
                )
            text = file.read(header_bytes)
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"there is no file {path}") from error
    header = _object(path, text)
    header.pop("__metadata__", None)
    at = 8 + header_bytes
    for name, fields in sorted(header.items(), key=lambda item: _start(path, *item)):
        entry, end = _entry(path, name, fields, 8 + header_bytes)
        check_range(entry, file_bytes)
        if entry.offset != at:
            raise CheckpointError(
                f"tensor {name} of {path} begins at byte {entry.offset}, the tensor before it ends at {at}"
            )
        at = end
        yield entry
    if at != file_bytes:
        raise CheckpointError(f"{path} has {file_bytes} bytes, its tensors end at byte {at}")


def _indexed(folder: Path, index: Path, files: list[Path]) -> dict[str, TensorEntry]:
    weight_map = _object(index, index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} has no weight_map that says which tensor is in which file")
    places = cast("dict[str, Any]", weight_map)
    for name, shard in places.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} puts tensor {name} in {shard!r}; expected a file name")
    shards = sorted(set(places.values()))
    for shard in shards:
        if not (folder / shard).is_file():
            lost = sorted(name for name, place in places.items() if place == shard)
            raise CheckpointError(
                f"{index} names the file {shard}, which is missing; it holds {len(lost)} tensors, such "
                f"as {lost[0]}",
                hint="fetch or copy the folder again",
            )
    found: dict[str, TensorEntry] = {}
    for shard in shards:
        for entry in read_header(folder / shard):
            if entry.name in found:
                raise CheckpointError(
                    f"tensor {entry.name} is in two files: {found[entry.name].file.name} and {shard} "
                    f"of {folder}"
                )
            found[entry.name] = entry
    for name, shard in places.items():
        if name not in found:
            raise CheckpointError(f"{index} puts tensor {name} in {shard}, which does not hold it")
        if found[name].file.name != shard:
            raise CheckpointError(
                f"{index} puts tensor {name} in {shard}; it is in {found[name].file.name}"
            )
    unlisted = sorted(found.keys() - places.keys())
    if unlisted:
        where = found[unlisted[0]].file.name
        raise CheckpointError(f"tensor {unlisted[0]} of {where} is not in {index}")
    _warn_of_extra([file for file in files if file.name not in shards], index.name)
    return found


def _warn_of_extra(files: list[Path], chosen: str) -> None:
    if files:
        names = ", ".join(file.name for file in files)
        log.warning("%s is not read: %s does not name it", f"{files[0].parent}: {names}", chosen)


def _entry(path: Path, name: str, fields: Any, data_start: int) -> tuple[TensorEntry, int]:
    """One tensor of a header, and where its bytes end in the file."""
    dtype, shape = fields.get("dtype"), fields.get("shape")
    start, end = fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedModelError(
            f"tensor {name} of {path} has dtype {dtype!r}, which is not known",
            hint=f"known: {', '.join(DTYPES)}",
        )
    if not isinstance(shape, list) or not all(
        isinstance(n, int) and n >= 0 for n in cast("list[Any]", shape)
    ):
        raise CheckpointError(f"tensor {name} of {path} has shape {shape!r}; expected counts")
    entry = TensorEntry(
        name=name,
        shape=tuple(cast("list[int]", shape)),
        format=DTYPES[dtype],
        file=path,
        offset=data_start + start,
        stored_name=name,
    )
    if end - start != entry.nbytes:
        raise CheckpointError(
            f"tensor {name} of {path} has {end - start} bytes; {dtype} {list(entry.shape)} takes "
            f"{entry.nbytes}"
        )
    return entry, data_start + end


def _start(path: Path, name: str, fields: Any) -> tuple[int, int]:
    """The byte range of a tensor within the data, checked to be one."""
    offsets = fields.get("data_offsets") if isinstance(fields, dict) else None
    match offsets:
        case [int(start), int(end)] if 0 <= start <= end:
            return start, end
        case _:
            raise CheckpointError(f"tensor {name} of {path} has data_offsets {offsets!r}")


def _object(path: Path, text: bytes) -> dict[str, Any]:
    """A JSON object, refusing names that occur twice."""
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except ValueError as error:
        raise CheckpointError(f"{path} holds no valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return cast("dict[str, Any]", found)


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise CheckpointError(f"{path} names {name!r} twice")
        found[name] = value
    return found
