"""Which side streams are open, who opened them, and may the segment end?

On a CPU the work of a fork runs in place, with the same bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokamak.errors import UnjoinedSideStream

Place = int | str | None
"""The segment's number, the eager region's name, or None outside of recorded runs."""


class SideStreams:
    """Forks from the compute stream, by name; each is joined before its segment or its forward ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._opened_in: dict[str, Place] = {}
        self._place: Place = None

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        """Start a side stream after what was launched so far; what the block launches goes there.

        Raises:
            UnjoinedSideStream: this fork is open already.
        """
        if name in self._opened_in:
            raise UnjoinedSideStream(
                f"side stream {name!r} was forked in {_say(self._place)} while open; "
                f"it was opened in {_say(self._opened_in[name])}",
                hint="join it before it is forked again",
            )
        self._opened_in[name] = self._place
        if self._device.type != "cuda":
            yield
            return
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def join(self, name: str) -> None:
        """Let the compute stream wait for a side stream.

        Raises:
            UnjoinedSideStream: it is not open, or was opened where a recorded join cannot wait for it.
        """
        if name not in self._opened_in:
            raise UnjoinedSideStream(
                f"side stream {name!r} is joined in {_say(self._place)} and was not forked",
                hint=f"open are {', '.join(self._opened_in) or 'none'}",
            )
        opened_in = self._opened_in[name]
        if isinstance(self._place, int) and opened_in != self._place:
            raise UnjoinedSideStream(
                f"side stream {name!r} was opened in {_say(opened_in)} and is joined in {_say(self._place)}",
                hint="join in an eager region what an eager region forked",
            )
        del self._opened_in[name]
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_stream(self._streams[name])

    def begin_segment(self, number: int) -> None:
        """What is forked from now on belongs to a recorded segment."""
        self._place = number

    @contextmanager
    def within_region(self, name: str) -> Iterator[None]:
        """What is forked inside belongs to an eager region."""
        before, self._place = self._place, name
        try:
            yield
        finally:
            self._place = before

    def check_segment_end(self, number: int) -> None:
        """Check that the segment joined what it forked.

        Raises:
            UnjoinedSideStream: it did not.
        """
        for name, opened_in in self._opened_in.items():
            if opened_in == number:
                raise UnjoinedSideStream(
                    f"side stream {name!r}, opened in {_say(opened_in)}, is open where segment {number} ends",
                    hint="join it before the break, or fork and join it in eager regions",
                )
        self._place = None

    def check_forward_end(self) -> None:
        """Check that everything was joined.

        Raises:
            UnjoinedSideStream: something was not.
        """
        for name, opened_in in self._opened_in.items():
            raise UnjoinedSideStream(
                f"side stream {name!r}, opened in {_say(opened_in)}, is open where the forward ends",
                hint="join it in the last eager region that needs its work",
            )

    def forget(self) -> None:
        """After an error: nothing is open, and what was forked does not write to memory that others take now."""
        if self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            for name in self._opened_in.keys() & self._streams.keys():
                torch.cuda.current_stream(self._device).wait_stream(self._streams[name])
        self._opened_in.clear()
        self._place = None


def _say(place: Place) -> str:
    if place is None:
        return "the eager forward"
    return f"segment {place}" if isinstance(place, int) else f"region {place!r}"
