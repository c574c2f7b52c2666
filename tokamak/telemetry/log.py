"""How do log lines look, and where do they go? One setup per process; modules only ask for their logger.

A line is `14:03:07 INFO engine.core: message`: time, level, the module without our package's name, and in an
engine process its rank. It goes to stderr, so that stdout stays a command's answer.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

QUIET_LOGGERS = (
    "uvicorn",
    "httpx",
    "urllib3",
    "huggingface_hub",
    "filelock",
    "llvmlite",
    "asyncio",
)
"""Libraries whose info lines say nothing of our work."""


class LineFormatter(logging.Formatter):
    """One line per record; a traceback follows only where an exception was logged."""

    def __init__(self, rank: str | None) -> None:
        place = "" if rank is None else f" [{rank}]"
        super().__init__(
            f"%(asctime)s %(levelname)s{place} %(place)s: %(message)s", datefmt="%H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        record.place = record.name.removeprefix("tokamak.")
        return super().format(record)


def set_up_logging(level: str, *, rank: str | None = None, stream: TextIO | None = None) -> None:
    """Log to stderr from now on; calling it again replaces the former setup.

    Args:
        level: one of LEVELS.
        rank: which engine process this is, such as `rank 0`; None in a front end.
        stream: where lines go in place of stderr.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(rank))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(LEVELS[level])
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(LEVELS[level], logging.WARNING))
