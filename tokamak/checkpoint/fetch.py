"""Where the model a user named lies on this machine, fetched first if it must be.

A name is a path, a built-in name such as `smollm2-135m`, or a hub id such as `org/name`.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import huggingface_hub

from tokamak.checkpoint.source import CONFIG
from tokamak.errors import ModelNotFoundError

BUILT_IN_NAMES = ("smollm2-135m",)

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]

HUB_EXCLUDED = ["*/*", "consolidated*.safetensors"]
"""Copies of the weights in other layouts, which some repositories hold as well."""


def resolve_model(model: str, *, progress: bool, revision: str | None = None) -> Path:
    """The folder or .gguf file of a model; `progress` shows a bar while fetching.

    Args:
        model: a path, a built-in name or a hub id.
        progress: whether to show how far a download is.
        revision: a branch, tag or commit of a hub repository.

    Raises:
        ModelNotFoundError: there is no such model, or it cannot be fetched.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        return _within(path)
    if model in BUILT_IN_NAMES:
        # Download machinery is imported when something is downloaded: it costs each start 0.1 s.
        built_in: Any = importlib.import_module("tokamak.checkpoint.built_in")
        return built_in.fetch_built_in(model, progress=progress)
    looks_like_path = model.startswith((".", "/", "~")) or path.suffix in (".gguf", ".safetensors")
    if looks_like_path or not HUB_ID.fullmatch(model):
        raise ModelNotFoundError(
            f"there is no model {model!r}: no such file or folder, and no built-in name",
            hint=f"built in: {', '.join(BUILT_IN_NAMES)}; hub ids look like org/name",
        )
    return _from_hub(model, revision, progress=progress)


def _within(path: Path) -> Path:
    """The folder or file itself, or the one .gguf file of a folder without config.json."""
    if path.is_dir() and not (path / CONFIG).is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return files[0]
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:8])
            raise ModelNotFoundError(
                f"{path} has {len(files)} .gguf files: {names}", hint="give the path of one of them"
            )
    return path


def _from_hub(repository: str, revision: str | None, *, progress: bool) -> Path:
    """The local copy of a hub repository; HF_HUB_OFFLINE and HF_HOME are honoured by the library."""
    shown = {} if progress else {"tqdm_class": _no_bar()}
    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            allow_patterns=HUB_PATTERNS,
            ignore_patterns=HUB_EXCLUDED,
            **shown,
        )
    # What the library's transport raises differs by its version; for us it is one thing.
    except Exception as error:
        detail = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelNotFoundError(
            f"model {repository!r} (revision {revision or 'default'}) is neither in the local hub cache "
            f"nor could it be fetched: {detail}",
            hint="check the name and the network; private models need HF_TOKEN",
        ) from error
    return Path(folder)


def _no_bar() -> Any:
    """The library's progress bar, switched off."""
    bar: Any = importlib.import_module("huggingface_hub.utils").tqdm

    class Silent(bar):
        """Counts and shows nothing."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent
