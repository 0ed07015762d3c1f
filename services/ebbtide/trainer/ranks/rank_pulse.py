"""Exchanges signs of life between the ranks over their store, so that frozen ranks are noticed.

Invariant: a thread writes this rank's count each second and reads the others'. If one stands still for the timeout,
this process may end by itself for a short time, and then exits with status 1. Time in which this process did not run
does not count.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ebbtide.claimed_runs.run_loop import RankLost
from ebbtide.telemetry import get_logger

log = get_logger(__name__)

_BEAT_S: Final = 1.0
#: Time between noticing the loss and exit, for rank 0 to give its lease back.
_LEAVE_S: Final = 5.0


class RankSilences:
    """Tracks for how long each rank's count stands still, by a given monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._looked: float | None = None

    def hear(self, counts: Mapping[int, bytes], now: float) -> dict[int, float]:
        """Returns the ranks that are silent for longer than the timeout -> seconds."""
        if self._looked is not None and now - self._looked > self._timeout_s / 2:
            self._seen.clear()  # this process stood still
        self._looked = now
        for rank, count in counts.items():
            if rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = (count, now)
        silent = {rank: now - since for rank, (_, since) in self._seen.items()}
        return {rank: seconds for rank, seconds in silent.items() if seconds > self._timeout_s}


class RankPulse:
    """Starts at once. Another thread calls `lost` with the error."""

    def __init__(self, rank: int, size: int, *, timeout_s: float, lost: Callable[[RankLost], None]) -> None:
        self._rank, self._size, self._timeout_s, self._lost = rank, size, timeout_s, lost
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="pulse", daemon=True).start()

    def stop(self) -> None:
        """Ends the watch: from now on ranks may be silent."""
        self._over.set()

    def _watch(self) -> None:
        try:
            self._beat()
        except RankLost as error:
            self._end(error)
        except RuntimeError:
            # Rank 0 (or torchrun) owns the store, so all ranks end with it.
            if not self._over.wait(_LEAVE_S / 2):
                self._end(RankLost("the store where the ranks meet is gone: rank 0's process, or its host, has ended"))

    def _beat(self) -> None:
        store = self._connect()
        others = [rank for rank in range(self._size) if rank != self._rank]
        silences = RankSilences(self._timeout_s)
        beat = 0
        while not self._over.is_set():
            beat += 1
            store.set(_key(self._rank), str(beat))
            counts = dict(zip(others, store.multi_get([_key(rank) for rank in others]), strict=True))
            for rank, seconds in silences.hear(counts, time.monotonic()).items():
                text = f"rank {rank} of {self._size} has been silent for {seconds:.1f} s (rank_timeout_s)"
                raise RankLost(f"{text}: it is frozen, or its host is")
            self._over.wait(min(_BEAT_S, self._timeout_s / 5))

    def _connect(self) -> Any:
        """Opens a connection of its own, as calls on another one may wait."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=max(self._timeout_s, 1.0))
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

    def _end(self, error: RankLost) -> None:
        if self._over.is_set():
            return
        log.error("the ranks end", rank=self._rank, reason=str(error))
        self._lost(error)
        self._over.wait(_LEAVE_S)
        os._exit(1)


def _key(rank: int) -> str:
    return f"ebbtide/pulse/{rank}"
