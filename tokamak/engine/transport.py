"""How do messages travel between a front end and its engine process?

One zmq socket on each side, over a unix socket in a folder of its own (loopback TCP where those do not exist), with
msgpack in between. Sending never blocks and nothing is dropped; what may wait is bounded by the scheduler's queue one
way and by `max_tokens` the other.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq

from tokamak.config.engine import EngineConfig
from tokamak.engine.messages import FromEngine, ToEngine

LINGER_MS = 2_000
"""How long a closing side tries to deliver its last messages."""

LONGEST_IPC_PATH = 100
"""Unix socket paths end a little above this on every system."""

In = TypeVar("In")
Out = TypeVar("Out")


class StartEngine(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process reads from its standard input before anything else."""

    endpoint: str
    config: EngineConfig
    parent_id: int
    """Process id of the front end."""
    dies_with_parent: bool
    """Ask the system for a kill when the front end's starting thread ends."""


class Channel(Generic[In, Out]):
    """One end: `send` what goes out, `receive` what came in, in order. One thread uses it."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], decoder: msgspec.msgpack.Decoder[In]
    ) -> None:
        """Make the socket; `front_end` and `engine` below connect it."""
        self._context = context
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder
        self._folder: Path | None = None
        self.endpoint = ""

    def listen(self) -> None:
        """Wait for the other end at `endpoint`, which only this user may open."""
        folder = Path(tempfile.mkdtemp(prefix="tokamak-"))
        path = folder / "engine.sock"
        if zmq.has("ipc") and len(str(path)) <= LONGEST_IPC_PATH:
            self._folder = folder
            self._socket.bind(f"ipc://{path}")
        else:
            folder.rmdir()
            self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, endpoint: str) -> None:
        """Meet the end that listens there."""
        self.endpoint = endpoint
        self._socket.connect(endpoint)

    def forget_endpoint(self) -> None:
        """Remove the socket's folder, once both ends are connected: nothing is left behind on disk."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def send(self, message: Out) -> bool:
        """Queue a message for the other end; False if nobody is connected to take it."""
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[In]:
        """Every message that has arrived; possibly none."""
        messages: list[In] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(frame))

    def wait(self, timeout_s: float) -> bool:
        """Block until a message is there, or the time is over."""
        return bool(self._socket.poll(int(timeout_s * 1000)))

    @property
    def has_news(self) -> bool:
        """Whether a message is there. Asking also re-arms `file_number`, which tells of changes only."""
        return bool(self._socket.poll(0))

    @property
    def file_number(self) -> int:
        """A descriptor that becomes readable when `has_news` may have changed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Deliver what is queued, for two seconds at most, and close."""
        self._context.destroy(linger=LINGER_MS)
        self.forget_endpoint()


def front_end_channel() -> Channel[FromEngine, ToEngine]:
    """The front end's side, listening."""
    channel = Channel[FromEngine, ToEngine](zmq.Context(), msgspec.msgpack.Decoder(FromEngine))
    channel.listen()
    return channel


def engine_channel(endpoint: str) -> Channel[ToEngine, FromEngine]:
    """The engine's side, connected."""
    channel = Channel[ToEngine, FromEngine](zmq.Context(), msgspec.msgpack.Decoder(ToEngine))
    channel.connect(endpoint)
    return channel
