"""Moves what a trainer needs only while it trains to host memory while its device is lent, and back: the optimiser's
state, unfinished gradients, and a reference network. The weights stay, as they are published meanwhile.

Invariant: between `give_up` and `restore` every tensor holds the same values, in host memory, so that a checkpoint may
be written meanwhile. Host memory is kept for the next time. All of it dies with the process, as the trainer's state
does.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ebbtide.gpu_memory import host_memory
from ebbtide.scheduling.elastic.memory_handover import HandoverMemory, lacking, moves_to_host
from ebbtide.telemetry import counter, get_logger, histogram

log = get_logger(__name__)

_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_seconds = histogram(
    "trainer_memory_seconds", "Moves of the trainer's memory off its device, or back", ("kind",), _BOUNDS
)
_moved = counter("trainer_memory_bytes_total", "Bytes that left the device, or came back", ("kind",))


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
        there = torch.empty_like(tensor, device="cpu", pin_memory=True) if former is None else former
        return there.copy_(tensor, non_blocking=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def settle(self) -> None:
        """Wait for all copies."""
        torch.cuda.synchronize(self._device)


class TrainerMemory:
    """`held()`: the tensors that may leave the device, sharded ones as this rank's shares."""

    def __init__(self, held: Callable[[], Iterable[Any]], room: CudaRoom) -> None:
        self._held, self._room = held, room
        self._still = threading.Lock()
        self._away: list[Tensor] = []
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # id -> the tensor and its place in host memory

    @property
    def still(self) -> threading.Lock:
        """Held while tensors move. What reads them while the device may be lent holds it too."""
        return self._still

    def give_up(self, needed: int) -> int:
        """Move everything to the host if an engine that needs so many bytes lacks room. Returns the bytes moved."""
        began = time.monotonic()
        with self._still:
            self._room.trim()
            movable = [tensor for tensor in map(_own, self._held()) if self._room.holds(tensor)]
            free, total, host_free, host_total = self._room.memory()
            memory = HandoverMemory(
                free=free,
                total=total,
                movable=sum(tensor.nbytes for tensor in movable),
                # What was moved before has its place in host memory.
                host_free=host_free + sum(there.nbytes for _, there in self._kept.values()),
                host_total=host_total,
                needed=needed,
            )
            if not moves_to_host(memory):
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

    def restore(self) -> int:
        """Bring everything back. Returns the bytes moved."""
        began = time.monotonic()
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

    def _move_out(self, movable: list[Tensor]) -> None:
        kept = dict[int, tuple[Tensor, Tensor]]()
        for tensor in movable:
            same = self._kept.get(id(tensor))
            former = same[1] if same is not None and same[0] is tensor and _alike(same[1], tensor) else None
            kept[id(tensor)] = (tensor, self._room.to_host(tensor.data, former))
        self._room.settle()
        for tensor, there in kept.values():
            tensor.data = there
        self._away, self._kept = movable, kept
        self._room.trim()


def _own(tensor: Any) -> Tensor:
    """This rank's share of a tensor: the tensor itself that the share is kept in, and no view of it."""
    found: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001
    return found


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
