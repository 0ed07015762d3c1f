"""Says on stderr what a command waits for, and since when, so that none is silent for long."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Final, Self

_FIRST_S: Final = 2.0
_EVERY_S: Final = 10.0
_LOOK_S: Final = 0.1


class Waiting:
    """A context manager. While its block waits for `what`, a thread says so after two seconds and then every ten.

    Of nested ones only the innermost speaks. Once it has spoken, the wait of the next one begins anew. A block that is
    not silent calls `heard` whenever it has shown something; that counts as spoken.

    Invariant: it only writes to stderr. `_inside` has the blocks that are entered, outermost first.
    """

    _inside: Final[list["Waiting"]] = []

    def __init__(self, what: str | Callable[[], str], *, first_s: float = _FIRST_S, every_s: float = _EVERY_S) -> None:
        self._what, self._first_s, self._every_s = what, first_s, every_s
        self._over, self._spoke = threading.Event(), False
        self._begin()

    def heard(self) -> None:
        """The wait begins anew."""
        self._begin()
        self._spoke = True

    def _begin(self) -> None:
        self._since, self._began, self._next_s = time.localtime(), time.monotonic(), self._first_s

    def __enter__(self) -> Self:
        self._begin()
        self._inside.append(self)
        self._over = threading.Event()
        threading.Thread(target=self._speak, args=(self._over,), name="waiting", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._inside.remove(self)
        if self._spoke and self._inside:
            self._inside[-1].heard()

    def _speak(self, over: threading.Event) -> None:
        while not over.wait(min(_LOOK_S, self._first_s)):
            waited_s = time.monotonic() - self._began
            if waited_s < self._next_s or self._inside[-1:] != [self]:
                continue
            self._next_s, self._spoke = waited_s + self._every_s, True
            what = self._what if isinstance(self._what, str) else self._what()
            since = time.strftime("%H:%M:%S", self._since)
            print(f"ebbtide: waiting for {what} since {since}, {waited_s:.0f} s", file=sys.stderr, flush=True)  # noqa: T201
