"""Joins the ranks that compute together, sums values over them, and shares notes and signs of life over their store.

Invariant of `RankBoard`: notes die with the store, which is rank 0's or torchrun's. Ranks that torchrun restarts do not
see the notes of those before them. A wait has a connection of its own, so it delays no other call.

Invariant of `RankPulse`: a thread writes this rank's count each second and reads the others'. If one does not move for
the timeout, the rank counts as frozen; this process may end by itself for a short time, and then exits with status 1.
Time in which this process did not run does not count.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from ebbtide.errors import EbbtideError, InvalidRequest, Unavailable
from ebbtide.run_client import RunFailed
from ebbtide.runtime import Aside
from ebbtide.telemetry import get_logger
from ebbtide.trainer.learning.out_of_memory import OutOfMemory
from ebbtide.trainer.ranks.rank_launcher import RankLost, RankPlace

#: Longest time of a call that need not wait for a note.
_CALL: Final = timedelta(seconds=30)
#: How often a wait looks for its note.
_LOOK_S: Final = 0.01


class RankBoard:
    """The notes, by name, of the ranks that torch's environment variables name. Every rank may make one at any time.

    Its calls raise `Unavailable` once the store is gone.
    """

    def __init__(self) -> None:
        self._calls, self._waits = Aside("rank notes"), Aside("rank waits")
        self._calling: Any = None
        self._waiting: Any = None

    async def put(self, name: str, note: bytes) -> None:
        await self._calls.do(lambda: _reachable(lambda: self._store().set(name, note)))

    async def find(self, names: Sequence[str]) -> dict[str, bytes]:
        """Those of the notes that there are."""
        return await self._calls.do(lambda: _reachable(lambda: self._found(names)))

    async def await_one(self, name: str, timeout_s: float) -> bytes | None:
        """The note, as soon as there is one; None if there is none in time."""
        return await self._waits.do(lambda: _reachable(lambda: self._awaited(name, timeout_s)))

    async def remove(self, name: str) -> None:
        await self._calls.do(lambda: _reachable(lambda: self._store().delete_key(name)))

    def _store(self) -> Any:
        self._calling = self._calling or _connected()
        return self._calling

    def _found(self, names: Sequence[str]) -> dict[str, bytes]:
        store = self._store()
        there = [name for name in names if store.check([name])]
        return dict(zip(there, store.multi_get(there), strict=True)) if there else {}

    def _awaited(self, name: str, timeout_s: float) -> bytes | None:
        store = self._waiting = self._waiting or _connected()
        end = time.monotonic() + timeout_s
        while not store.check([name]):  # the store's own wait warns of each that ends without a note
            if time.monotonic() > end:
                return None
            time.sleep(_LOOK_S)
        note: bytes = store.get(name)
        return note


def _connected() -> Any:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CALL)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")  # torchrun's store outlives the ranks that it restarts
    return PrefixStore(f"/notes/attempt_{attempt}", store) if attempt else store


def _reachable(call: Any) -> Any:
    try:
        return call()
    except RuntimeError as error:
        text = str(error).partition("\n")[0][:300]
        raise Unavailable(f"the store where the ranks meet does not answer ({text})") from None


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


#: Time for all ranks to join: people may start them by hand on several hosts.
_JOIN: Final = timedelta(minutes=5)
#: Time for one collective, in which ranks wait at most for each other's micro-batches. `RankPulse` notices lost or
#: frozen ranks long before.
_COLLECTIVE: Final = timedelta(minutes=30)


class RankWorld:
    """The joined ranks. All ranks construct it together, once in a process."""

    def __init__(self, place: RankPlace, device: str) -> None:
        """`device`: cpu, or cuda for the GPU with this rank's number on its host.

        Raises `InvalidRequest` without such a device, and `RankLost` unless all ranks join.
        """
        self.rank, self.size = place.rank, place.size
        self.device = f"cuda:{place.local_rank}" if device == "cuda" else device
        if device == "cuda" and place.local_rank >= torch.cuda.device_count():
            text = f"rank {place.rank} has no GPU: this host has {torch.cuda.device_count()}; start fewer ranks on it"
            raise InvalidRequest(text, field="ranks")
        self.settle()
        try:
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=_store(place), rank=place.rank, world_size=place.size, timeout=_COLLECTIVE
            )
            self.mesh: DeviceMesh = init_device_mesh(device, (place.size,))
        except RuntimeError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise RankLost(f"the {place.size} ranks did not come together at {where} ({first_line(error)})") from None

    def settle(self) -> None:
        """Selects the rank's CUDA device in the calling thread; each thread has its own selection."""
        if self.device.startswith("cuda"):
            torch.cuda.set_device(self.device)

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Returns the sums over all ranks, which all call this with as many values."""
        sums = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(sums)
        found: list[float] = sums.tolist()
        return found


def _store(place: RankPlace) -> Any:
    """Connects to the store where the ranks meet: rank 0's, or torchrun's."""
    if place.listening is None:
        return next(rendezvous("env://", timeout=_JOIN))[0]
    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        place.size,
        is_master=True,
        timeout=_JOIN,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=place.listening,
    )


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]


class OtherRankFailed(RunFailed):
    """Another rank failed, and this one gave up. The other's error says why."""


@contextmanager
def agreeing(add_up: Callable[[Sequence[float]], list[float]]) -> Iterator[None]:
    """Raises on all ranks if something fails on one: what follows, they compute together. Not if memory runs out, which
    ends all ranks anyway. `add_up` sums over the ranks."""
    failure: EbbtideError | None = None
    try:
        yield
    except OutOfMemory:
        raise
    except EbbtideError as error:
        failure = error
    if add_up([float(failure is not None)])[0]:
        raise failure or OtherRankFailed("another rank failed, and its log says why; mend that, and submit again")


def is_lost(error: BaseException) -> bool:
    """Whether torch reports that a rank did not answer. gloo's errors are plain `RuntimeError`s."""
    kinds: Any = (dist.DistError,)
    text = str(error)
    return isinstance(error, kinds) or "gloo" in text or "Connection reset" in text or "Connection closed" in text


@contextmanager
def computing() -> Iterator[None]:
    """Raises `RankLost` for errors of torch that mean that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if is_lost(error):
            raise RankLost(f"another rank is gone ({first_line(error)})") from None
        raise


@contextmanager
def exchanging() -> Iterator[None]:
    """Raises `RankLost` if an exchange of orders finds no answer."""
    try:
        yield
    except Unavailable as error:
        raise RankLost(str(error)) from None
