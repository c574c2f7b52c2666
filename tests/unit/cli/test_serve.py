"""The address is taken before anything else, and a taken one is told with one that is free."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokamak.cli import address, main
from tokamak.config.engine import ServerConfig
from tokamak.config.options import ServeOptions
from tokamak.config.settle import settle_server
from tokamak.errors import OptionError


def listening_on(**options: object) -> ServerConfig:
    return settle_server(ServeOptions(**options))


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_free_port_is_taken_and_told() -> None:
    with address.bind(listening_on(port=0)) as made:
        port = made.getsockname()[1]

        assert address.address(made) == f"http://127.0.0.1:{port}"
        with pytest.raises(OptionError):
            address.bind(listening_on(port=port))


def test_a_port_in_use_is_one_line_with_a_port_that_works(taken: int) -> None:
    with pytest.raises(OptionError) as caught:
        address.bind(listening_on(port=taken))

    message = str(caught.value)
    assert f"port is {taken}, where something listens already on host 127.0.0.1" in message
    free = re.search(r"hint: use port=(\d+)", message)
    assert free is not None
    address.bind(listening_on(port=int(free[1]))).close()


def test_a_port_in_use_ends_the_command_before_a_model_is_looked_for(
    taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main.run(["serve", "no-such-model", "--port", str(taken)])

    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tokamak: error: port is {taken}")


def test_an_address_that_is_not_ours_names_host_and_port() -> None:
    with pytest.raises(OptionError, match=r"host is '192\.0\.2\.1' and port is 8000"):
        address.bind(listening_on(host="192.0.2.1"))


def test_a_socket_file_is_taken_and_told(tmp_path: Path) -> None:
    path = tmp_path / "tokamak.sock"

    with address.bind(listening_on(uds=str(path))) as made:
        assert address.address(made) == f"unix:{path}"
        with pytest.raises(OptionError, match="something listens already"):
            address.bind(listening_on(uds=str(path)))


def test_a_socket_file_left_by_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "tokamak.sock")
    address.bind(listening_on(uds=path)).close()

    with address.bind(listening_on(uds=path)) as made:
        assert made.getsockname() == path


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")

    with pytest.raises(OptionError, match="a file and no socket"):
        address.bind(listening_on(uds=str(path)))

    assert path.read_text() == "mine"
