"""Moves a trainer's memory off its device while others have it, and back.

While the device is lent to engines, that is what only training needs: the optimiser's state, unfinished gradients, and
a reference network. The weights stay, as they are published meanwhile. Moving costs the time of two copies over the
bus, so it is done only if an engine lacks the memory to resume. If the host has no memory for it either, everything
stays, and the engine waits: other workers generate, if there are any.

While another trainer has its turn on the device, everything leaves it, the weights too (`ebbtide.trainer.learning.
parked_state`).

Invariant: between `give_up` and `restore` every tensor holds the same values, in host memory, so that a checkpoint may
be written meanwhile. Between `leave` and `restore` tensors have no values, and nothing may read them. Host memory is
kept for the next time. All of it dies with the process, as the trainer's state does.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import torch
from msgspec import Struct
from torch import Tensor

from ebbtide.client.publisher.tensor_snapshots import allocate
from ebbtide.gpu_memory import host_memory
from ebbtide.telemetry import counter, get_logger, histogram
from ebbtide.trainer.learning.optimizer import own_part
from ebbtide.trainer.learning.parked_state import Parked, StatePark, return_free_memory, storages_of

#: Share of a device's memory that stays free beside the engine: its steps allocate beyond what it keeps.
_RESERVE: Final = 0.03
#: Share of the host's memory that stays free: mirrors of weights and checkpoints being written lie there.
_HOST_RESERVE: Final = 0.1


class HandoverMemory(Struct, frozen=True, kw_only=True):
    """Memory in bytes, measured once the trainer's caches are empty."""

    free: int  # on the device
    total: int
    movable: int  # that the trainer can move to the host
    host_free: int
    host_total: int
    needed: int  # by an engine, to come back; 0: none needs any, or it is unknown


def moves_to_host(memory: HandoverMemory) -> bool:
    """Whether the movable memory leaves the device."""
    short = memory.needed + _RESERVE * memory.total > memory.free
    fits = memory.host_free - memory.movable >= _HOST_RESERVE * memory.host_total
    return memory.needed > 0 and short and memory.movable > 0 and fits


def lacking(free: int, total: int, needed: int) -> int:
    """Bytes of the device that an engine lacks to come back."""
    return max(0, needed + int(_RESERVE * total) - free) if needed else 0


log = get_logger(__name__)

_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_seconds = histogram(
    "trainer_memory_seconds", "moves of the trainer's memory off its lent GPU (`kind` out), or back", ("kind",), _BOUNDS
)
_moved = counter(
    "trainer_memory_bytes_total",
    "bytes of the trainer's memory that left its lent GPU (`kind` out), or came back",
    ("kind",),
)
_left = counter(
    "trainer_parked_bytes_total",
    "bytes of the trainer's state that left its device for another trainer's turn; `state`: warm (host memory) or cold",
    ("state",),
)
_parked_seconds = histogram(
    "trainer_parked_seconds",
    "moves of the trainer's whole state off its device (`kind` out) or back; `state`: warm (host memory) or cold",
    ("kind", "state"),
    _BOUNDS,
)


class Room(Protocol):
    """The memory of a device."""

    def holds(self, tensor: Tensor) -> bool: ...

    def trim(self) -> None:
        """Give what is kept for later back to the device."""
        ...

    def memory(self) -> tuple[int, int, int, int]:
        """Free and all bytes of the device, available and all bytes of the host."""
        ...

    def to_host(self, tensor: Tensor, former: Tensor | None) -> Tensor:
        """A copy in host memory, in `former` if it is given."""
        ...

    def to_device(self, tensor: Tensor) -> Tensor: ...

    def settle(self) -> None:
        """Wait for all copies."""
        ...


class CpuRoom:
    """The memory of a process that trains on a CPU. Engines beside it have their own, so nothing has to make room for
    them."""

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def trim(self) -> None:
        return_free_memory()

    def memory(self) -> tuple[int, int, int, int]:
        return (*host_memory(), *host_memory())

    def to_host(self, tensor: Tensor, former: Tensor | None) -> Tensor:  # noqa: ARG002 - the interface
        return tensor

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor

    def settle(self) -> None:
        """Copies are done when they return."""


class CudaRoom:
    """The memory of one GPU, and of the host beside it."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def trim(self) -> None:
        """Give what torch keeps for later back to the device."""
        torch.cuda.empty_cache()

    def memory(self) -> tuple[int, int, int, int]:
        """Free and all bytes of the device, available and all bytes of the host."""
        free, total = torch.cuda.mem_get_info(self._device)
        return (free, total, *host_memory())

    def to_host(self, tensor: Tensor, former: Tensor | None) -> Tensor:
        """A copy in host memory, in `former` if it is given."""
        if former is None:
            place = torch.from_numpy(allocate(tensor.nbytes, str(tensor.device)))
            former = place.view(tensor.dtype).as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())
        return former.copy_(tensor, non_blocking=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def settle(self) -> None:
        """Wait for all copies."""
        torch.cuda.synchronize(self._device)


class TrainerMemory:
    """`held()`: the tensors that may leave the device while it is lent, sharded ones as this rank's shares; `whole()`:
    all that leave it for another trainer's turn, to `park`. Without a `park`, `leave` is not called."""

    def __init__(
        self,
        held: Callable[[], Iterable[Any]],
        room: Room,
        *,
        whole: Callable[[], Iterable[Any]] | None = None,
        park: StatePark | None = None,
    ) -> None:
        self._held, self._room = held, room
        self._whole, self._park = whole or held, park
        self._still = threading.Lock()
        self._away: list[Tensor] = []
        self._places: list[Tensor] = []  # in host memory, for the next time
        self._place = ""  # of the parked state: warm or cold

    @property
    def still(self) -> threading.Lock:
        """Held while tensors move. What reads them while the device may be lent holds it too."""
        return self._still

    def give_up(self, needed: int) -> int:
        """Move everything to the host if an engine that needs so many bytes lacks room. Returns the bytes moved."""
        began = time.monotonic()
        with self._still:
            self._room.trim()
            movable = [tensor for tensor in map(own_part, self._held()) if self._room.holds(tensor)]
            free, total, host_free, host_total = self._room.memory()
            memory = HandoverMemory(
                free=free,
                total=total,
                movable=sum(tensor.nbytes for tensor in movable),
                # What was moved before has its place in host memory.
                host_free=host_free + sum(place.nbytes for place in self._places),
                host_total=host_total,
                needed=needed,
            )
            if self._away or not moves_to_host(memory):  # what is away has the places
                return 0
            self._move_out(movable)
        _seconds.labels("out").observe(took := time.monotonic() - began)
        _moved.labels("out").inc(memory.movable)
        log.info("memory moved to the host", bytes=memory.movable, took_s=round(took, 4), free_before=free)
        return memory.movable

    def lacking(self, needed: int) -> int:
        """Bytes that an engine which needs so many still lacks on the device."""
        free, total, _, _ = self._room.memory()
        return lacking(free, total, needed)

    def leave(self) -> Parked:
        """Move the whole state off the device, for another trainer's turn. Raises `RunFailed` if it has no room
        elsewhere; then it stays."""
        if self._park is None or self._park.taken:
            return Parked(0, warm=True)
        began = time.monotonic()
        with self._still:
            self._room.settle()
            tensors = [tensor for tensor in map(own_part, self._whole()) if self._room.holds(tensor)]
            parked = self._park.park(storages_of(tensors))
            self._room.trim()
        self._place = "warm" if parked.warm else "cold"
        _parked_seconds.labels("out", self._place).observe(took := time.monotonic() - began)
        _left.labels(self._place).inc(parked.size)
        log.info("the state left the device", bytes=parked.size, place=self._place, took_s=round(took, 4))
        return parked

    def restore(self) -> int:
        """Bring everything back. Returns the bytes moved. Raises `StateDamaged` if it came back with other bytes."""
        began = time.monotonic()
        if self._park is not None and self._park.taken:
            with self._still:
                try:
                    moved = self._park.bring_back()
                except BaseException:
                    self._room.trim()
                    raise
            _parked_seconds.labels("back", self._place).observe(took := time.monotonic() - began)
            log.info("the state is back", bytes=moved, place=self._place, took_s=round(took, 4))
            return moved
        with self._still:
            moved = sum(tensor.nbytes for tensor in self._away)
            for tensor in self._away:
                tensor.data = self._room.to_device(tensor.data)
            self._room.settle()
            self._away = []
        if moved:
            _seconds.labels("back").observe(time.monotonic() - began)
            _moved.labels("back").inc(moved)
        return moved

    def forget(self) -> None:
        """Free what is parked, of a training that is over. Nothing may read the tensors any more."""
        if self._park is not None:
            self._park.close()

    def _move_out(self, movable: list[Tensor]) -> None:
        free = defaultdict[object, list[Tensor]](list)
        while self._places:
            place = self._places.pop()
            free[_form(place)].append(place)
        for tensor in movable:
            alike = free[_form(tensor)]
            self._places.append(self._room.to_host(tensor.data, alike.pop() if alike else None))
        free.clear()
        self._room.settle()
        for tensor, place in zip(movable, self._places, strict=True):
            tensor.data = place
        self._away = movable
        self._room.trim()


def _form(tensor: Tensor) -> object:
    return tensor.shape, tensor.dtype, tensor.stride()
