"""Log lines tell time, level, module and rank, and there is one setup."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from tokamak.telemetry.log import set_up_logging


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_has_time_level_module_and_rank() -> None:
    stream = io.StringIO()
    set_up_logging("info", rank="rank 0", stream=stream)

    logging.getLogger("tokamak.engine.core").info("%d blocks", 7)

    assert re.fullmatch(
        r"\d\d:\d\d:\d\d INFO \[rank 0\] engine\.core: 7 blocks\n", stream.getvalue()
    )


def test_lines_below_the_level_are_left_out() -> None:
    stream = io.StringIO()
    set_up_logging("warning", stream=stream)

    logging.getLogger("tokamak.x").info("quiet")
    logging.getLogger("tokamak.x").warning("loud")

    assert stream.getvalue().endswith("WARNING x: loud\n")
    assert "quiet" not in stream.getvalue()


def test_a_second_setup_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    set_up_logging("info", stream=first)
    set_up_logging("info", stream=second)

    logging.getLogger("tokamak.x").info("once")

    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


def test_libraries_do_not_fill_the_log() -> None:
    stream = io.StringIO()
    set_up_logging("info", stream=stream)

    logging.getLogger("httpx").info("request")

    assert stream.getvalue() == ""
