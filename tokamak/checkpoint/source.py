"""What a checkpoint is, before any tensor is read: its config, and where each tensor lies.

In: a folder as Hugging Face lays it out, or a .gguf file. Out: a `Checkpoint` that speaks Hugging Face's
names in both cases. Nothing here imports torch, so the front end may ask too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, cast

from tokamak.checkpoint.compressed_sizes import (
    block_multiple,
    cache_token_numbers,
    ngram_numbers,
    ngram_token_numbers,
    ratios,
)
from tokamak.checkpoint.entry import PACKED_FORMAT, TensorEntry
from tokamak.checkpoint.gguf import GgufFile
from tokamak.checkpoint.gguf_config import (
    ROPE_FACTORS,
    hugging_face_name,
    interleaved_heads,
    read_config,
)
from tokamak.checkpoint.safetensors import find_tensors
from tokamak.checkpoint.scaled import Scheme, is_table, join_scales, table_bytes
from tokamak.config.engine import ModelFacts
from tokamak.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

CONFIG = "config.json"

STORED_NAMES = {
    "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8", "E2M1": "float4",
}  # fmt: skip
"""How plain formats are called in facts; block formats keep their GGUF names."""


NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of a number, by the format a config names."""


class Checkpoint:
    """A model's config and its tensors' places."""

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        entries: Mapping[str, TensorEntry],
        scheme: Scheme | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self.scheme = scheme
        """How its config says that weights are quantised; None where it says nothing."""
        self._entries = dict(entries)

    def names(self) -> tuple[str, ...]:
        """Every tensor's name; none in a folder that has only a config."""
        return tuple(self._entries)

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self._entries:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self._entries[name]

    @property
    def architecture(self) -> str:
        """The first name of `architectures`.

        Raises:
            CheckpointError: the config names none.
        """
        match self.config.get("architectures"):
            case [str(name), *_]:
                return name
            case other:
                raise CheckpointError(
                    f"architectures of {self.path} is {other!r}; expected a list with a class name",
                    hint='such as "architectures": ["LlamaForCausalLM"]',
                )

    def facts(self) -> ModelFacts:
        """What the settling of options must know; sizes are those of the config where no tensors are.

        Raises:
            CheckpointError: the config lacks a size.
        """
        layers, heads = self._size("num_hidden_layers"), self._size("num_attention_heads")
        compressed = ratios(self._text)
        kv_heads = self._size("num_key_value_heads", heads)
        head_dim = self._size("head_dim", self._size("hidden_size") // heads)
        entries = self._entries.values()
        bytes_by_format: Counter[str] = Counter()
        for entry in entries:
            bytes_by_format[entry.format.name] += entry.bytes_with_scales
        if entries:
            main = bytes_by_format.most_common(1)[0][0]
            stored, weight_bytes = STORED_NAMES.get(main, main), bytes_by_format.total()
            parameters = sum(prod(entry.shape) for entry in entries)
            tables = [entry for entry in entries if is_table(entry.name)]
            scaled = sum(
                prod(entry.shape)
                for entry in entries
                if entry.scales is not None and not is_table(entry.name)
            )
            of_tables = sum(prod(entry.shape) for entry in tables)
            bytes_of_tables = sum(entry.bytes_with_scales for entry in tables)
            packed = sum(prod(entry.shape) for entry in entries if entry.format == PACKED_FORMAT)
        else:
            stored = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32")
            in_layers, outside = self._expected_parameters(kv_heads, head_dim)
            parameters, weight_bytes = in_layers + outside, 0
            scaled, packed = 0 if self.scheme is None else in_layers, 0
            of_tables = ngram_numbers(self._text)
            number_bytes = NUMBER_BYTES.get(stored, 4)
            bytes_of_tables = table_bytes(of_tables, self.scheme, number_bytes)
        return ModelFacts(
            architecture=self.architecture,
            vocab_tokens=self._size("vocab_size"),
            max_position_tokens=self._size("max_position_embeddings"),
            stored_dtype=stored,
            weight_bytes=weight_bytes,
            parameters=parameters,
            scaled_parameters=scaled,
            packed_parameters=packed,
            table_parameters=of_tables,
            table_bytes=bytes_of_tables,
            cache_token_numbers=cache_token_numbers(self._text, head_dim)
            if compressed
            else 2 * layers * kv_heads * head_dim,
            step_token_numbers=self._step_token_numbers(heads, kv_heads, head_dim),
            block_multiple=block_multiple(self._text) if compressed else 1,
        )

    def _step_token_numbers(self, heads: int, kv_heads: int, head_dim: int) -> int:
        """Of one token: four rows of the layer's width, its n-grams, and its queries, keys and values or widest MLP.

        Routed experts hold a row of every chosen expert: what comes in, both inner products, what goes out.
        """
        width = self._size("hidden_size")
        attention = (3 * heads + 2 * kv_heads) * head_dim
        mlp = 3 * self._dense_width()
        if self._experts():
            chosen, inner = self._size("num_experts_per_tok"), self._size("moe_intermediate_size")
            mlp = max(mlp, chosen * (3 * inner + 2 * width))
        return 4 * width + ngram_token_numbers(self._text) + max(attention, mlp)

    def _expected_parameters(self, kv_heads: int, head_dim: int) -> tuple[int, int]:
        """Numbers of a decoder's layers with the config's sizes, norms and biases left out, and of its tables."""
        width, heads = self._size("hidden_size"), self._size("num_attention_heads")
        attention = width * head_dim * (2 * heads + 2 * kv_heads)
        embeddings = 1 if self._text.get("tie_word_embeddings") else 2
        layers = self._size("num_hidden_layers")
        sparse, experts = 0, self._experts()
        of_sparse = 0
        if experts:
            dense = self._text.get("mlp_only_layers") or ()
            every = self._size("decoder_sparse_step", 1)
            sparse = sum((at + 1) % every == 0 and at not in dense for at in range(layers))
            of_sparse = experts * width * (3 * self._size("moe_intermediate_size") + 1)
        of_dense = 3 * width * self._dense_width()
        mlps = sparse * of_sparse + (layers - sparse) * of_dense
        tables = embeddings * self._size("vocab_size") * width + ngram_numbers(self._text)
        return layers * attention + mlps, tables

    def _experts(self) -> int:
        """Experts of a layer that has some; 0 where none is said to."""
        for name in ("num_experts", "num_local_experts", "n_routed_experts"):
            if self._text.get(name) is not None:
                return self._size(name)
        return 0

    def _dense_width(self) -> int:
        """The inner width of layers without experts; where all have some, that of an expert."""
        return self._size("intermediate_size", self._text.get("moe_intermediate_size"))

    @property
    def _text(self) -> Mapping[str, Any]:
        """The config of the language model, where others stand beside it."""
        text = self.config.get("text_config")
        return text if isinstance(text, dict) else self.config

    def _size(self, name: str, default: int | None = None) -> int:
        value = self._text.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{name} of {self.path} is {value!r}; expected a positive count")
        return value


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder or a .gguf file. A folder may lack weights: random ones need only its config.

    Raises:
        ModelNotFoundError: there is nothing at `path`, or a folder without config.json.
        CheckpointError: files are missing, truncated or contradict each other.
        UnsupportedModelError: weights in a format, or quantised by a method, that we do not read.
    """
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ModelNotFoundError(
            f"there is no model at {path}", hint="give a folder with config.json or a .gguf file"
        )
    if path.suffix == ".gguf":
        return _open_gguf(path)
    raise UnsupportedModelError(
        f"{path} is a file, but not a .gguf file",
        hint="give the folder that holds config.json and the weights",
    )


def _open_folder(path: Path) -> Checkpoint:
    config = read_json(path / CONFIG)
    if config is None:
        raise ModelNotFoundError(
            f"{path} has no {CONFIG}", hint="give a folder with config.json or a .gguf file"
        )
    return Checkpoint(path, *join_scales(path / CONFIG, config, find_tensors(path)))


def _open_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    config = read_config(file)
    entries: dict[str, TensorEntry] = {}
    for tensor in file.tensors.values():
        if tensor.name == ROPE_FACTORS:
            continue
        name = hugging_face_name(tensor.name)
        entries[name] = TensorEntry(
            name=name,
            shape=tensor.shape,
            format=tensor.format,
            file=path,
            offset=tensor.offset,
            stored_name=tensor.name,
            interleaved_heads=interleaved_heads(config, name),
        )
    return Checkpoint(path, config, entries)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, or None if there is no such file.

    Raises:
        CheckpointError: the file holds no valid JSON object.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(f"{path} holds no valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return cast("dict[str, Any]", found)
