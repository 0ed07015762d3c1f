"""Stops and continues a program that shares its cores with a serving engine, as the engine's guard grants them.

Invariant: the program runs only while nothing is inside the serving engine, by the page of the worker beside it;
otherwise its whole group is stopped (SIGSTOP). Budgets for steps beside requests do not apply to it. It is continued at
the end in any case. If this process dies, the kernel kills the program, stopped or not.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ebbtide.demo.coserving.coserving_records import BudgetMoment
from ebbtide.grants import Page

#: Interval of reading the page; an arriving request regains the cores within it.
_LOOK_S: Final = 0.002
#: Interval of recording the page.
_NOTE_S: Final = 0.05


class GuardedPausing:
    """Made by `pausing`."""

    def __init__(self, page: Page, pid: Callable[[], int | None]) -> None:
        self._page, self._pid = page, pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pausing", daemon=True)
        self._stopped: int | None = None
        self.moments: list[BudgetMoment] = []  # the page over time
        self.generated = 0  # goes into the next moment

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Continues the program for good, and returns then."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        noted = 0.0
        try:
            while not self._done.wait(_LOOK_S):
                budget, now = self._page.offered(), time.monotonic()
                changed = self._let(runs=self._page.idle())
                if changed or now >= noted + _NOTE_S:
                    noted = now
                    self._note(now, budget.tokens, budget.sequences)
        finally:
            self._signal(self._stopped, signal.SIGCONT)

    def _let(self, *, runs: bool) -> bool:
        """Runs or stops the program. Returns whether that is a change."""
        pid = None if runs and self._stopped is None else self._pid()
        wanted = None if runs else pid
        if wanted == self._stopped:
            return False
        if not runs:
            self._signal(pid, signal.SIGSTOP)
        elif pid == self._stopped:  # else that program ended, and another may have its id
            self._signal(pid, signal.SIGCONT)
        self._stopped = wanted
        return True

    def _signal(self, pid: int | None, number: signal.Signals) -> None:
        if pid is not None:
            with suppress(ProcessLookupError):  # it ended; the launcher starts another
                os.killpg(pid, number)

    def _note(self, now: float, tokens: int, sequences: int) -> None:
        moment = BudgetMoment(
            at_s=now,
            tokens=tokens,
            sequences=sequences,
            generated=self.generated,
            busy_s=self._page.steps().busy_s,
            training=self._stopped is None,
        )
        self.moments.append(moment)


@contextmanager
def pausing(page: Page, pid: Callable[[], int | None]) -> Iterator[GuardedPausing]:
    """Paces the program with the group `pid()` by the grants on `page` while the block runs.

    A thread calls `pid`, which returns None while there is no such program.
    """
    made = GuardedPausing(page, pid)
    made.start()
    try:
        yield made
    finally:
        made.stop()
