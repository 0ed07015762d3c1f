"""Finds stop strings in text that comes in pieces, and holds back what may yet become one."""

from collections.abc import Sequence


class StopStrings:
    """Watches the text of one response. What it finds does not depend on how the text was cut.

    The stop string that is complete first ends the text; of several that end at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: without empty ones, which would end every text at once."""
        self._stops = [one for one in stops if one]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text that may be shown, and the stop string that was met, which is not shown.

        Nothing is pushed afterwards if one was met.
        """
        self._held += text
        if met := self._met():
            start, stop = met
            shown, self._held = self._held[:start], ""
            return shown, stop
        shown = self._held[: self._certain()]
        self._held = self._held[len(shown) :]
        return shown, None

    def end(self) -> str:
        """Returns what was held back: the response ended, and it became no stop string."""
        held, self._held = self._held, ""
        return held

    def _met(self) -> tuple[int, str] | None:
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(found)[1:] if found else None

    def _certain(self) -> int:
        """How many characters cannot be the start of a stop string."""
        return min((self._start_of(stop) for stop in self._stops), default=len(self._held))

    def _start_of(self, stop: str) -> int:
        at = max(0, len(self._held) - len(stop) + 1)
        while (at := self._held.find(stop[0], at)) >= 0:
            if stop.startswith(self._held[at:]):
                return at
            at += 1
        return len(self._held)
