"""Which tokenizer and chat template a model comes with.

A folder has tokenizer.json and its settings; a GGUF file has a vocabulary, which is made into a tokenizer
once and kept beside the file, so that later starts take a tenth of a second.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import processors

from tokamak.checkpoint.byte_tokenizer import byte_tokenizer
from tokamak.checkpoint.gguf import GgufFile
from tokamak.checkpoint.gguf_vocabulary import END_TEXTS, read_vocabulary
from tokamak.checkpoint.source import CONFIG, open_checkpoint, read_json
from tokamak.checkpoint.tokenizer_cache import cached_tokenizer
from tokamak.errors import CheckpointError, ModelNotFoundError, OptionError, UnsupportedModelError
from tokamak.text.chat_format import ChatFormat, ToolFormat
from tokamak.text.chat_template import ChatTemplate
from tokamak.text.deepseek_chat import DeepseekChat
from tokamak.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"

TOKENIZER_CONFIG = "tokenizer_config.json"

GENERATION_CONFIG = "generation_config.json"

TEMPLATE = "chat_template.jinja"

OTHER_VOCABULARIES = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")

DEEPSEEK_FORMATS: dict[str, ToolFormat] = {
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV41ForCausalLM": "deepseek_v41",
}
"""Chat formats by architecture, for checkpoints that come without a template."""

LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer")
"""Tokenizer classes whose add_bos_token overrules what tokenizer.json does."""


def load_tokenizer(path: Path, *, load_format: Literal["auto", "random"] = "auto") -> Tokenizer:
    """The tokenizer of a folder or a .gguf file.

    With `load_format="random"`, a folder without one gets a byte tokenizer of its config's size.

    Raises:
        ModelNotFoundError: there is no model at `path`, or no tokenizer in it.
        UnsupportedModelError: a tokenizer is there, of a kind we do not read.
        CheckpointError: its files are damaged or contradict each other.
    """
    if path.suffix == ".gguf" and not path.is_dir():
        return cached_tokenizer(path, lambda: read_vocabulary(GgufFile(path)))
    if (path / TOKENIZER).is_file():
        return _from_folder(path)
    others = [name for name in OTHER_VOCABULARIES if (path / name).is_file()]
    if others:
        raise UnsupportedModelError(
            f"{path} has no {TOKENIZER}, only {others[0]}",
            hint="make one with transformers (the extra `hf`): "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})",
        )
    if load_format == "random":
        return byte_tokenizer(open_checkpoint(path).facts().vocab_tokens)
    raise ModelNotFoundError(
        f"{path} has no {TOKENIZER}",
        hint="fetch or copy the whole folder, tokenizer files included",
    )


def load_chat_template(path: Path, override: str | None) -> ChatFormat | None:
    """The chat format: the template file `override` if given, else the model's own; None if it has none.

    A model without a template has a format if one is known for its architecture.

    Raises:
        OptionError: `override` is no file, or no valid template.
        CheckpointError: the model's template is not valid.
    """
    if path.suffix == ".gguf" and not path.is_dir():
        source, bos_token, eos_token = _gguf_template(path)
    else:
        source, bos_token, eos_token = _folder_template(path)
    if override is None:
        if source is None:
            return _architecture_format(path)
        return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)
    try:
        text = Path(override).expanduser().read_text(encoding="utf-8")
        return ChatTemplate(text, bos_token=bos_token, eos_token=eos_token)
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        raise OptionError(
            f"chat_template {override!r} cannot be used: {error}",
            hint="give the path of a file with a Jinja template, or leave it out",
        ) from error


def _architecture_format(path: Path) -> ChatFormat | None:
    """The format of architectures whose checkpoints have no template."""
    config = (read_json(path / CONFIG) or {}) if path.is_dir() else {}
    match config.get("architectures"):
        case [str(name), *_] if name in DEEPSEEK_FORMATS:
            return DeepseekChat(DEEPSEEK_FORMATS[name])
        case _:
            return None


def _gguf_template(path: Path) -> tuple[str | None, str, str]:
    file = GgufFile(path)
    source = file.get("tokenizer.chat_template", str)
    bos_id = file.get("tokenizer.ggml.bos_token_id", int)
    eos_id = file.get("tokenizer.ggml.eos_token_id", int)
    if source is None and (bos_id, eos_id) == (None, None):
        return None, "", ""
    tokens = file.strings("tokenizer.ggml.tokens")
    bos_token, eos_token = (
        tokens[i] if i is not None and 0 <= i < len(tokens) else "" for i in (bos_id, eos_id)
    )
    return source, bos_token, eos_token


def _folder_template(path: Path) -> tuple[str | None, str, str]:
    settings = read_json(path / TOKENIZER_CONFIG) or {}
    bos_token, eos_token = (_token_text(settings.get(f"{name}_token")) for name in ("bos", "eos"))
    file = path / TEMPLATE
    if file.is_file():
        return file.read_text(encoding="utf-8"), bos_token or "", eos_token or ""
    return _default_template(path, settings), bos_token or "", eos_token or ""


def _default_template(path: Path, settings: dict[str, Any]) -> str | None:
    """The template of a tokenizer config: one text, or the one named `default` of several."""
    match settings.get("chat_template"):
        case None:
            return None
        case str(source):
            return source
        case list(several):
            named = {t.get("name"): t.get("template") for t in several if isinstance(t, dict)}
            source = named.get("default")
            if isinstance(source, str):
                return source
            raise CheckpointError(
                f"{path / TOKENIZER_CONFIG} has chat templates {sorted(map(str, named))}, none of them "
                "named 'default'",
                hint="choose one by putting it into a file and giving that as chat_template",
            )
        case other:
            raise CheckpointError(f"chat_template of {path / TOKENIZER_CONFIG} is {other!r}")


def _from_folder(path: Path) -> Tokenizer:
    file = path / TOKENIZER
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    # The library raises bare exceptions for whatever is wrong with a file.
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}", hint="fetch or copy the file again"
        ) from error
    # Some files were saved while they cut or filled training batches; a prompt is never cut or filled.
    backend.no_truncation()
    backend.no_padding()
    settings = read_json(path / TOKENIZER_CONFIG) or {}
    config = read_json(path / CONFIG) or {}
    generation = read_json(path / GENERATION_CONFIG) or {}
    bos_id = _token_id(backend, settings.get("bos_token"))
    if bos_id is None:
        bos_id = next(iter(_ids(config.get("bos_token_id"))), None)
    _respect_add_bos(backend, settings, bos_id)
    eos_ids = {*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
    named = _token_id(backend, settings.get("eos_token"))
    eos_ids |= {named} if named is not None else set()
    special = {i: t.content for i, t in backend.get_added_tokens_decoder().items() if t.special}
    eos_ids |= {i for i, text in special.items() if text in END_TEXTS}
    return Tokenizer(backend, bos_id=bos_id, eos_ids=eos_ids)


def _respect_add_bos(
    backend: tokenizers.Tokenizer, settings: dict[str, Any], bos_id: int | None
) -> None:
    """Llama's tokenizer classes put BOS first, or do not, as their settings say."""
    wanted = settings.get("add_bos_token")
    if bos_id is None or not isinstance(wanted, bool):
        return
    if settings.get("tokenizer_class") not in LLAMA_CLASSES:
        return
    puts_bos = backend.encode("a", add_special_tokens=True).ids[:1] == [bos_id]
    if wanted and not puts_bos:
        bos = backend.id_to_token(bos_id)
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, bos_id)]
        )
    elif puts_bos and not wanted:
        backend.post_processor = processors.TemplateProcessing(single=["$A"], special_tokens=[])


def _token_text(value: Any) -> str | None:
    """A token of tokenizer_config.json: a text, or an object with its `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _token_id(backend: tokenizers.Tokenizer, value: Any) -> int | None:
    text = _token_text(value)
    return backend.token_to_id(text) if text is not None else None


def _ids(value: Any) -> list[int]:
    """The ids of a config field that holds one, several or none."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and not isinstance(i, bool)]
