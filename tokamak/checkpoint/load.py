"""How a checkpoint's tensors get into a model: strictly.

Names, shapes and formats are checked before anything is read. Then every parameter is set exactly once,
and every tensor of the checkpoint is used, or is one the model says it does not need. For a GPU, layers are given
weights that are there already: read through pinned memory, or drawn there.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

import torch

from tokamak.checkpoint.entry import TensorEntry
from tokamak.checkpoint.read import Reader, can_read
from tokamak.checkpoint.scaled import Scheme
from tokamak.checkpoint.source import Checkpoint
from tokamak.checkpoint.upload import Uploader
from tokamak.core.weight import DenseWeight, Weight
from tokamak.errors import CheckpointError, UnsupportedModelError
from tokamak.quant.weights import fp8_weight, mxfp4_weight

log = logging.getLogger(__name__)

HEAD = "lm_head.weight"

EXPERTS = ".experts."

EMBEDDING = "model.embed_tokens.weight"

CPU = torch.device("cpu")

COMPARED_BYTES = 1 << 24
"""How much of two tensors is compared at a time."""


class Loadable(Protocol):
    """A parameter, as `layers/model.py` defines it: made of one or several checkpoint tensors."""

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each checkpoint tensor it is made from, in order."""
        ...

    def load(self, parts: Sequence[Weight]) -> None:
        """Take the weights, convert, pack and place them."""
        ...

    def draw(self, generator: torch.Generator) -> list[Weight]:
        """Random parts, for `load`."""
        ...


@runtime_checkable
class MayStay(Protocol):
    """A parameter that may lie in the host's memory, whatever the device: `load` is given what was read from files."""

    @property
    def on_host(self) -> bool:
        """Whether it does."""
        ...


class LoadableModel(Protocol):
    """What loading needs of a model."""

    def take_names(self, names: Collection[str]) -> None:
        """Told the names of a checkpoint's tensors before `weights` is asked."""
        ...

    def weights(self) -> Mapping[str, tuple[Loadable, tuple[str, ...]]]:
        """Every parameter by its own name: where it lives, and the checkpoint tensors it is made of."""
        ...

    def optional_weights(self) -> frozenset[str]:
        """Checkpoint tensors that may be there and are not needed."""
        ...


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded."""

    parameters: int
    """Numbers in all parameters."""
    tensors: int
    """Tensors read."""
    stored_bytes: int
    """Bytes they take in the checkpoint."""
    unused: tuple[str, ...]
    """Tensors of the checkpoint the model does not need."""
    seconds: float


def load_model(
    model: LoadableModel, checkpoint: Checkpoint, device: torch.device = CPU
) -> LoadReport:
    """Load every parameter of `model`, which was built for `device`.

    Raises:
        CheckpointError: a tensor is missing, is left over, or has another shape than the model's.
        UnsupportedModelError: a tensor has a number format we do not read.
    """
    began = time.perf_counter()
    model.take_names(checkpoint.names())
    weights = model.weights()
    wanted = _check(weights, model.optional_weights(), checkpoint)
    reader = Reader()
    unused = tuple(name for name in checkpoint.names() if name not in wanted)
    if HEAD in unused and EMBEDDING in wanted:
        _warn_of_another_head(reader, checkpoint)
    uploader = None if device.type == "cpu" else Uploader(device)
    for parameter, sources in weights.values():
        read = [reader.read(checkpoint.entry(name)) for name in sources]
        stays = isinstance(parameter, MayStay) and parameter.on_host
        if uploader is not None and not stays:
            read = [uploader.weight(each) for each in read]
        parameter.load(read)
    _end_loading(device)
    entries = [checkpoint.entry(name) for name in wanted]
    return LoadReport(
        parameters=sum(prod(entry.shape) for entry in entries),
        tensors=len(entries),
        stored_bytes=sum(entry.bytes_with_scales for entry in entries),
        unused=unused,
        seconds=time.perf_counter() - began,
    )


def load_random(
    model: LoadableModel, seed: int, device: torch.device = CPU, scheme: Scheme | None = None
) -> LoadReport:
    """Fill every parameter with random numbers: the same for the same seed, names and kind of device.

    Numbers are drawn on the device, which the model was built for: a large model takes seconds there. scheme: how the
    checkpoint's config says weights are quantised; random ones are then, too.
    """
    began = time.perf_counter()
    weights = model.weights()
    # What parameters draw without naming a device is drawn on this one.
    with device:
        for name, (parameter, sources) in weights.items():
            digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
            parameter.load(as_stored(parameter.draw(generator), sources, scheme))
    _end_loading(device)
    shapes = [shape for parameter, _ in weights.values() for shape in parameter.part_shapes]
    return LoadReport(
        parameters=sum(prod(shape) for shape in shapes),
        tensors=0,
        stored_bytes=0,
        unused=(),
        seconds=time.perf_counter() - began,
    )


def load_nothing(model: LoadableModel, device: torch.device, scheme: Scheme | None) -> None:
    """Give every parameter weights of its shapes and number format, whose numbers are whatever memory holds."""
    for parameter, sources in model.weights().values():
        parts: list[Weight] = [
            DenseWeight(torch.empty(shape, device=device)) for shape in parameter.part_shapes
        ]
        parameter.load(as_stored(parts, sources, scheme))


def as_stored(
    parts: Sequence[Weight], sources: Sequence[str], scheme: Scheme | None
) -> list[Weight]:
    """Weights in the number format that checkpoint tensors of these names have under a scheme."""
    if scheme is None:
        return list(parts)
    return [
        _quantised(part, name, scheme) if isinstance(part, DenseWeight) else part
        for part, name in zip(parts, sources, strict=True)
    ]


def _quantised(weight: DenseWeight, name: str, scheme: Scheme) -> Weight:
    if not scheme.covers(name, weight.shape):
        return weight
    if scheme.packed and EXPERTS in name:
        return mxfp4_weight(weight.values)
    block = scheme.block_of(name, weight.shape)
    return fp8_weight(weight.values, block, powers_of_two=scheme.powers)


def _end_loading(device: torch.device) -> None:
    """Wait for what is on its way, and give memory back that only loading needed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _check(
    weights: Mapping[str, tuple[Loadable, tuple[str, ...]]],
    optional: frozenset[str],
    checkpoint: Checkpoint,
) -> list[str]:
    """Compare what the model wants with what the checkpoint has; the names of tensors to read."""
    present = set(checkpoint.names())
    if not present:
        raise CheckpointError(
            f"{checkpoint.path} holds no weights, only a config",
            hint='use load_format="random" to run it with random ones',
        )
    wanted: list[str] = []
    for name, (parameter, sources) in weights.items():
        shapes = parameter.part_shapes
        assert len(shapes) == len(sources), f"{name} declares {len(shapes)} shapes of {sources}"
        for source, shape in zip(sources, shapes, strict=True):
            if source not in present:
                _refuse_missing(source, checkpoint)
            _check_tensor(checkpoint.entry(source), shape)
        wanted += sources
    assert len(set(wanted)) == len(wanted), "a checkpoint tensor is used twice"
    left_over = sorted(present - set(wanted) - optional)
    if left_over:
        entry = checkpoint.entry(left_over[0])
        more = f" and {len(left_over) - 1} more" if len(left_over) > 1 else ""
        raise CheckpointError(
            f"tensor {entry.where}{more} has no place in the model",
            hint="the config describes a smaller or another model than the weights",
        )
    return wanted


def _refuse_missing(name: str, checkpoint: Checkpoint) -> None:
    if name == HEAD:
        raise CheckpointError(
            f"{checkpoint.path} has no tensor {HEAD}, and its config does not tie the output head to "
            f"the embedding (tie_word_embeddings is {checkpoint.config.get('tie_word_embeddings')})",
            hint="set tie_word_embeddings to true if the model has no head of its own",
        )
    raise CheckpointError(
        f"{checkpoint.path} has no tensor {name}, which the model needs",
        hint="the weights are incomplete, or the config describes a larger or another model",
    )


def _check_tensor(entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise CheckpointError(
            f"tensor {entry.where} has shape {list(entry.shape)}; the config makes it {list(shape)}"
        )
    if entry.scales is None and not can_read(entry.format.name):
        raise UnsupportedModelError(
            f"tensor {entry.where} has the number format {entry.format.name}, which is not supported"
        )


def _warn_of_another_head(reader: Reader, checkpoint: Checkpoint) -> None:
    """The config ties the head, and the checkpoint has one: the config decides."""
    head, embedding = checkpoint.entry(HEAD), checkpoint.entry(EMBEDDING)
    if head.format == embedding.format and head.shape == embedding.shape:
        ours, theirs = reader.stored_bytes(embedding), reader.stored_bytes(head)
        pieces = zip(ours.split(COMPARED_BYTES), theirs.split(COMPARED_BYTES), strict=True)
        if all(torch.equal(a, b) for a, b in pieces):
            return
    log.warning(
        "%s ties the output head to the embedding, so %s, which differs from it, is not used; set "
        "tie_word_embeddings to false to use it",
        checkpoint.path,
        HEAD,
    )
