"""What does `tokamak serve` do first? Options, the address, the engine process; then HTTP is loaded beside it.

The address is taken first, so a wrong setting is told within a second. The engine process starts before the web
framework is imported: both take about as long, and a model is served that much sooner.
"""

from __future__ import annotations

import importlib
import socket
import sys
from pathlib import Path
from typing import Protocol, cast

from tokamak.cli.address import bind
from tokamak.cli.flags import Parser, add_options, read_options
from tokamak.config.engine import EngineConfig, ServerConfig
from tokamak.config.options import ServeOptions
from tokamak.config.settle import settle_server
from tokamak.engine.configure import configure
from tokamak.engine.launch import EngineProcess
from tokamak.telemetry.log import set_up_logging


class _ServingModule(Protocol):
    """What `tokamak.cli.serving` offers."""

    def serve(
        self,
        process: EngineProcess,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        listening: socket.socket,
    ) -> int: ...


def run(arguments: list[str]) -> int:
    """Serve until told to end; see `run --help`."""
    parser = Parser(
        prog="tokamak serve",
        usage="tokamak serve [MODEL] [options]",
        description="Serve a model over the OpenAI API.",
    )
    add_options(parser, ServeOptions)
    options = read_options(parser.parse(arguments), ServeOptions)
    set_up_logging(options.log_level)
    server_config = settle_server(options)
    listening = bind(server_config)
    try:
        engine_config = configure(options, progress=sys.stderr.isatty())
        return _serve(engine_config, server_config, listening)
    finally:
        listening.close()
        if server_config.uds is not None:
            Path(server_config.uds).unlink(missing_ok=True)


def _serve(
    engine_config: EngineConfig, server_config: ServerConfig, listening: socket.socket
) -> int:
    """Start the engine process, then import the server and run it; returns the exit status."""
    process = EngineProcess(engine_config)
    try:
        serving = cast("_ServingModule", importlib.import_module("tokamak.cli.serving"))
        return serving.serve(process, engine_config, server_config, listening)
    finally:
        process.kill()
