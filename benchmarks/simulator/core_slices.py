"""Divides one core among engines in equal slices of time, so that each is as fast however busy the others are.

Each engine has its turn of `SLICE_S`, and is stopped (SIGSTOP) while another has it. A turn that nobody holds passes
unused. So an engine is a device of a third of a core, whatever runs beside it, and a fleet of three fits on a machine
of two cores; without turns the engines of a step's tail would run faster than those of its begin.
Invariant: a process that is no longer in `engines` is not stopped. If this process dies, its engines die with it.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

from benchmarks.real_time import above_the_measured

#: About the computation of one engine step, so that a step takes about as many turns as there are.
SLICE_S: Final = 0.006


class CoreSlices:
    """Made by `core_slices`. The processes of `engines[turn]` run in that turn alone."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._engines: dict[int, tuple[int, ...]] = {}
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="core slices", daemon=True)
        self.late_s = 0.0  # by which turns lasted longer than they should, in all

    def assign(self, engines: Mapping[int, tuple[int, ...]]) -> None:
        """Gives turns to engines (turn -> ids of its processes) in place of all former ones. Raises `ValueError`."""
        if any(not 0 <= turn < self._turns for turn in engines):
            raise ValueError(f"turns are 0 to {self._turns - 1}")
        with self._lock:
            for pids in self._engines.values():
                _signal(pids, signal.SIGCONT)
            self._engines = dict(engines)
            for pids in self._engines.values():
                _signal(pids, signal.SIGSTOP)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Lets all engines run, and returns then."""
        self._done.set()
        self._thread.join()
        self.assign({})

    def _run(self) -> None:
        above_the_measured()
        while not self._done.is_set():
            for turn in range(self._turns):
                self.take(turn)

    def take(self, turn: int) -> None:
        """Lets the engine of a turn run for that long."""
        with self._lock:
            pids = self._engines.get(turn, ())
            _signal(pids, signal.SIGCONT)
        began = time.monotonic()
        time.sleep(SLICE_S)
        with self._lock:
            if self._engines.get(turn, ()) == pids:
                _signal(pids, signal.SIGSTOP)
        self.late_s += time.monotonic() - began - SLICE_S


def _signal(pids: tuple[int, ...], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it was killed
            os.kill(pid, number)


@contextmanager
def core_slices(turns: int) -> Iterator[CoreSlices]:
    """Takes turns while the block runs; all engines run freely afterwards."""
    made = CoreSlices(turns)
    made.start()
    try:
        yield made
    finally:
        made.stop()
