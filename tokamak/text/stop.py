"""Where a stop string ends a text that arrives in pieces, and how much may be shown before.

Text is matched character by character, so the way it is cut into pieces changes nothing. The stop that
is complete first wins; of two that end together, the longer one. Only text that can still become a stop
is held back.
"""

from __future__ import annotations


class StopStrings:
    """Watches one text for several stop strings."""

    def __init__(self, stops: tuple[str, ...], *, include: bool) -> None:
        """Watch for `stops`; `include` releases the stop string as well."""
        assert all(stops), "an empty stop string matches everywhere"
        self.matched: str | None = None
        self._include = include
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def feed(self, text: str) -> str:
        """Take more text; return what may be shown. After a match it is always empty."""
        if self.matched is not None:
            return ""
        held_before = len(self._held)
        self._held += text
        for at, character in enumerate(text):
            if stop := self._first_complete(character):
                self.matched = stop
                end = held_before + at + 1
                shown = self._held[: end if self._include else end - len(stop)]
                self._held = ""
                return shown
        hold = max((matcher.length for matcher in self._matchers), default=0)
        shown = self._held[: len(self._held) - hold]
        self._held = self._held[len(self._held) - hold :]
        return shown

    def finish(self) -> str:
        """The text held back, once it is known that nothing follows."""
        rest, self._held = self._held, ""
        return rest

    def _first_complete(self, character: str) -> str | None:
        """Advance every matcher; the longest stop that ends with this character, if any."""
        complete = [matcher.stop for matcher in self._matchers if matcher.advance(character)]
        return complete[0] if complete else None


class _Matcher:
    """How many characters of one stop the text ends with (Knuth, Morris and Pratt)."""

    __slots__ = ("_fallback", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._fallback = [0] * len(stop)
        """By matched characters minus one: the longest shorter match that may go on."""
        matched = 0
        for at in range(1, len(stop)):
            while matched and stop[at] != stop[matched]:
                matched = self._fallback[matched - 1]
            matched += stop[at] == stop[matched]
            self._fallback[at] = matched

    def advance(self, character: str) -> bool:
        """Take one character; whether the stop is complete with it."""
        while self.length and self.stop[self.length] != character:
            self.length = self._fallback[self.length - 1]
        self.length += self.stop[self.length] == character
        return self.length == len(self.stop)
