"""Where does a server listen? A port or a socket file is taken, or it is said why not and what is free."""

from __future__ import annotations

import contextlib
import errno
import socket
import stat
from pathlib import Path

from tokamak.config.engine import ServerConfig
from tokamak.errors import OptionError

BACKLOG = 2048


def bind(config: ServerConfig) -> socket.socket:
    """Take the address that the server will listen on.

    Raises:
        OptionError: it is taken, or not ours to take; the message has one that is free.
    """
    if config.uds is not None:
        return _bind_unix(config.uds)
    try:
        family, _, _, _, _ = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return _bind_tcp(family, config.host, config.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            free = _free_port_after(config)
            raise OptionError(
                f"port is {config.port}, where something listens already on host {config.host}",
                hint=f"use port={free}" if free else "use another port",
            ) from None
        raise OptionError(
            f"host is {config.host!r} and port is {config.port}; the system cannot listen there: "
            f"{error.strerror or error}",
            hint="use host=127.0.0.1 and a port above 1023",
        ) from None


def _bind_tcp(family: int, host: str, port: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        # uvicorn listens again with its own backlog; listening here makes the port ours from now on.
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def _free_port_after(config: ServerConfig) -> int | None:
    for port in range(config.port + 1, min(config.port + 50, 65536)):
        with contextlib.suppress(OSError), _bind_tcp(socket.AF_INET, config.host, port):
            return port
    return None


def _bind_unix(path: str) -> socket.socket:
    """A socket file; one that a dead server left behind is replaced."""
    place = Path(path)
    if place.exists() and not stat.S_ISSOCK(place.stat().st_mode):
        raise OptionError(
            f"uds is {path!r}, which is a file and no socket", hint="use another path"
        )
    if place.exists():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                place.unlink()
            else:
                raise OptionError(
                    f"uds is {path!r}, where something listens already", hint="use another path"
                )
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(path)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise OptionError(f"uds is {path!r}; the system cannot listen there: {error}") from None
    return made


def address(listening: socket.socket) -> str:
    """Where clients find a socket, as they would write it."""
    name = listening.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"
