"""What a user asks for: every option by name, with its default, its range and its help.

The same names everywhere: keyword arguments in Python, flags (`--max-model-len`), environment variables
(`TOKAMAK_MAX_MODEL_LEN`) and keys of a TOML file (`--config` or `TOKAMAK_CONFIG`). An argument or flag
wins over the environment, the environment over the file, the file over the default. A value may say
"auto"; `settle.py` decides it. A name nobody knows, or a value out of range, is an OptionError of one line.

Names follow vLLM's where the meaning is the same.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from tokamak.config.option_values import (
    Assignments,
    Auto,
    ByteCount,
    Count,
    Sizes,
    Strings,
    as_bytes,
    expected_of,
    spelled_cache_dtype,
    spelled_dtype,
)
from tokamak.config.places import CACHE_VARIABLE
from tokamak.errors import OptionError

ENV_PREFIX = "TOKAMAK_"

CONFIG_VARIABLE = "TOKAMAK_CONFIG"

DEFAULT_MODEL = "smollm2-135m"


def _option(default: Any, group: str, text: str) -> Any:
    """A field: its default, the group it is listed under, and the only copy of its help."""
    return Field(default=default, description=text, json_schema_extra={"group": group})


class EngineOptions(BaseSettings):
    """Everything one may ask of an engine."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        env_ignore_empty=True,
        protected_namespaces=(),
    )

    config: str | None = _option(
        None, "model", "A TOML file with options by these names; flags and TOKAMAK_* win over it."
    )
    model: str = _option(
        DEFAULT_MODEL,
        "model",
        "A folder with config.json and safetensors, a .gguf file, a hub id, or smollm2-135m.",
    )
    revision: str | None = _option(
        None, "model", "Branch, tag or commit of a hub id; the hub's default when left out."
    )
    served_model_name: Strings = _option(
        (),
        "model",
        "Names clients may use; the first is reported. The model as given when left out.",
    )
    load_format: Literal["auto", "random"] = _option(
        "auto",
        "model",
        "auto reads the checkpoint; random makes weights from config.json and seed.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = _option(
        0, "model", "Seeds random weights and the noise of requests that bring no seed."
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], BeforeValidator(spelled_dtype)] = (
        _option(
            "auto",
            "model",
            "Arithmetic: float32 (fp32, exact), bfloat16 (bf16), or the device's best.",
        )
    )
    device: Literal["auto", "cpu", "cuda"] = _option(
        "auto",
        "model",
        "Where the model runs; auto is a GPU if there is one and triton, else the CPU.",
    )
    engram_tables: Literal["auto", "device", "host"] = _option(
        "auto",
        "model",
        "Where tables of n-grams (DeepSeek V4.1) lie: host is pinned memory for a GPU, the mapped file for a CPU.",
    )
    max_model_len: Auto | Count = _option(
        "auto", "model", "Most tokens of prompt and output together; auto is the most that fits."
    )
    bounded_replay: bool = _option(
        False,
        "model",
        "Prefill late layers of DeepSeek V4.1 for a window of each prompt alone: faster, and near instead of exact.",
    )
    chat_template: str | None = _option(
        None, "model", "A file with a jinja2 chat template that replaces the model's own."
    )

    block_size: Annotated[int, Field(ge=1, le=1024)] | Auto = _option(
        "auto", "cache", "Tokens in one block of the cache."
    )
    kv_cache_memory_bytes: Annotated[Auto | ByteCount, BeforeValidator(as_bytes)] = _option(
        "auto", "cache", "Memory for the cache of all requests, such as 2GiB."
    )
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "fp8", "native"], BeforeValidator(spelled_cache_dtype)
    ] = _option(
        "auto",
        "cache",
        "Keys and values: bfloat16 (bf16), fp8 (fp8_e4m3; unscaled, twice the tokens), native (packed as the model was "
        "trained to keep them, without loss), or dtype's format.",
    )
    num_blocks_override: Count | None = _option(
        None, "cache", "Exactly this many cache blocks, whatever memory they take."
    )
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | Auto = _option(
        "auto",
        "cache",
        "Share of the device's memory for all an engine holds, in (0, 1]; auto is 0.9 of a GPU, 0.5 of a CPU's.",
    )
    enable_prefix_caching: bool = _option(
        True, "cache", "Reuse cached blocks between requests whose prompts begin alike."
    )

    max_num_seqs: Auto | Count = _option("auto", "scheduler", "Most requests that run in one step.")
    max_num_batched_tokens: Auto | Count = _option(
        "auto", "scheduler", "Most tokens in one step; longer prompts are cut into chunks of it."
    )
    scheduling_policy: Literal["fcfs", "priority"] = _option(
        "fcfs", "scheduler", "fcfs runs requests as they come; priority runs lower numbers first."
    )
    max_waiting_requests: Count = _option(
        1024, "scheduler", "Most requests in the queue; more are refused with 503."
    )
    max_waiting_tokens: Auto | Count = _option(
        "auto", "scheduler", "Most prompt tokens in the queue; more are refused with 503."
    )

    threads: Auto | Annotated[int, Field(ge=1, le=1024)] = _option(
        "auto", "kernels", "CPU threads of the model; auto is the cores this process may use."
    )
    kernels: Assignments = _option(
        (), "kernels", "Backends to use, as op=backend; `tokamak doctor` lists them."
    )

    graphs: Literal["auto", "startup", "serving", "on-demand", "off"] = _option(
        "auto",
        "graphs",
        "When steps are recorded: before serving, from then on, when a size first comes, never.",
    )
    graph_backend: Literal["auto", "cuda", "sim", "none"] = _option(
        "auto", "graphs", "What records: cuda on a GPU, sim on a CPU, none with graphs off."
    )
    req_graph_sizes: Sizes = _option(
        "auto", "graphs", "Requests of recorded decode steps; an empty list is off."
    )
    token_graph_sizes: Sizes = _option(
        "auto", "graphs", "Tokens of recorded steps with prefill; an empty list is off."
    )
    token_graph_max: Count = _option(
        2048, "graphs", "The largest of the default token sizes; token_graph_sizes replaces them."
    )
    token_graph_eager_pad: bool = _option(
        False, "graphs", "Run token buckets eagerly with the same padding, to find a fault's place."
    )
    graph_pools: Literal["per_graph", "per_bucket"] = _option(
        "per_graph", "graphs", "Who shares memory: all buckets of a graph, or none (diagnosis)."
    )
    graphs_allow_missing_bucket: bool = _option(
        False, "graphs", "Serve without buckets that fail to record; out of memory always ends."
    )
    verify_graphs: bool = _option(
        False, "graphs", "Compare every bucket with the eager forward before it serves."
    )
    verify_graphs_rate: Annotated[float, Field(ge=0.0, le=1.0)] = _option(
        0.0, "graphs", "Share of replayed steps compared with the eager forward while serving."
    )
    poison_pad_rows: bool = _option(
        False, "graphs", "Fill what padding rows read with NaN, to find a row that reads them."
    )

    def __init__(self, **given: Any) -> None:
        """Gather options from arguments, TOKAMAK_* variables and the TOML file, in this order.

        Args:
            given: options by name. `_from="flags"` says that they were flags, for error messages.

        Raises:
            OptionError: a name is unknown, or a value is not what the option takes.
        """
        spelled: str = given.pop("_from", "arguments")
        known = option_names(type(self))
        for name in given:
            if name not in known:
                raise OptionError(f"there is no option {name!r}", hint=closest(name, known))
        _refuse_unknown_variables()
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise OptionError(_explain(type(self), error, given, spelled)) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the environment, then the TOML file."""
        assert isinstance(init_settings, InitSettingsSource)
        path = _config_path(cast("dict[str, Any]", init_settings.init_kwargs))
        values = {} if path is None else read_config_file(path)
        own = {name: value for name, value in values.items() if name in settings_cls.model_fields}
        return init_settings, env_settings, InitSettingsSource(settings_cls, own)


class ServeOptions(EngineOptions):
    """Everything one may ask of a server: the engine's options, and how it listens."""

    host: str = _option("127.0.0.1", "server", "Address to listen on; 0.0.0.0 is every interface.")
    port: Annotated[int, Field(ge=0, le=65535)] = _option(
        8000, "server", "TCP port; 0 takes a free one and prints it."
    )
    uds: str | None = _option(
        None, "server", "A unix socket to listen on in place of host and port."
    )
    api_key: Annotated[Strings, Field(repr=False)] = _option(
        (), "server", "Keys a client may send as a bearer token; none asked for when left out."
    )
    allowed_origins: Strings = _option(
        (), "server", "Origins a browser may call from (CORS); * is all."
    )
    max_body_bytes: Annotated[ByteCount, BeforeValidator(as_bytes)] = _option(
        16 * 1024**2, "server", "Longest request body; a longer one gets 413."
    )
    drain_timeout_s: Annotated[float, Field(ge=0.0, le=86400.0)] = _option(
        30.0, "server", "Seconds running requests may take to end after SIGTERM."
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info", "server", "Least severe messages to log."
    )


def option_names(options: type[EngineOptions]) -> tuple[str, ...]:
    """The names of a model's options, in the order they are documented."""
    return tuple(options.model_fields)


def option_group(field: FieldInfo) -> str:
    """The group a field is listed under."""
    return cast("dict[str, str]", field.json_schema_extra)["group"]


def closest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: the known name most like it, or where the list is."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else "docs/reference/options.md lists every option"


def read_config_file(path: str) -> dict[str, Any]:
    """The options of a TOML file; keys of any command are welcome, unknown ones are not.

    Raises:
        OptionError: the file cannot be read, is not TOML, or has a key that is no option.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"config is {path!r}, which cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"config file {path} is not TOML: {error}") from error
    known = [name for name in option_names(ServeOptions) if name != "config"]
    for name in values:
        if name not in known:
            raise OptionError(
                f"config file {path} has {name!r}, which is no option", hint=closest(name, known)
            )
    return values


def _config_path(given: Mapping[str, Any]) -> str | None:
    path = given.get("config") or os.environ.get(CONFIG_VARIABLE) or None
    return None if path is None else str(path)


def _refuse_unknown_variables() -> None:
    known = {CACHE_VARIABLE} | {
        f"{ENV_PREFIX}{name.upper()}" for name in option_names(ServeOptions)
    }
    for variable in os.environ:
        if variable.startswith(ENV_PREFIX) and variable not in known:
            raise OptionError(
                f"the environment has {variable}, which is no option", hint=closest(variable, known)
            )


def _explain(
    options: type[EngineOptions], error: ValidationError, given: Mapping[str, Any], spelled: str
) -> str:
    """One line per wrong option, joined: its name, value, where it came from, what is expected."""
    reasons: dict[str, list[str]] = {}
    values: dict[str, object] = {}
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0])
        reasons.setdefault(name, []).append(expected_of(problem))
        values.setdefault(name, problem["input"])
    lines: list[str] = []
    for name, expected in reasons.items():
        secret = not options.model_fields[name].repr
        value = "not valid" if secret else repr(values[name])
        wanted = " or ".join(dict.fromkeys(expected))
        lines.append(f"{name} is {value}{_source(name, given, spelled)}; it must be {wanted}")
    return "; ".join(lines)


def _source(name: str, given: Mapping[str, Any], spelled: str) -> str:
    if name in given:
        return f" (from the flag --{name.replace('_', '-')})" if spelled == "flags" else ""
    variable = f"{ENV_PREFIX}{name.upper()}"
    if os.environ.get(variable):
        return f" (from the variable {variable})"
    path = _config_path(given)
    return "" if path is None else f" (from the file {path})"
