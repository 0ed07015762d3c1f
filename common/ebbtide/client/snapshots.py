"""Copies of a trainer's tensors in this process's memory, so that it may go on while they are published.

torch is not imported: who has tensors of it has it already.
"""

import mmap
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ebbtide.errors import InvalidRequest
from ebbtide.weights import NamedTensor, named_tensor
from ebbtide.weights.dtypes import dtype_name
from ebbtide.weights.sharded import Part, is_sharded, own_part

#: Tensors by name, or pairs of name and tensor; read once, one tensor at a time.
Tensors = Mapping[str, Any] | Iterable[NamedTensor | tuple[str, Any]]

#: Smaller tensors are not worth locked pages of their own; a GPU's copy of one takes microseconds.
_PINNED_BYTES: Final = 1 << 16
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Snapshot:
    """Memory for one version, taken anew or again by each `take`.

    Invariant: `tensors` are those of the last `take` that returned, and change with the next. The memory stays for as
    long as this does, and is as much as the largest tensors that stood in each place.
    """

    def __init__(self) -> None:
        self.tensors: tuple[NamedTensor, ...] = ()
        self._buffers: list[Bytes] = []
        self._pinned: list[bool] = []

    def take(self, tensors: Tensors, *, first: bool = True) -> None:
        """Copy `tensors`. Of sharded ones, what this process publishes of them; whole ones only for the `first`.

        GPUs copy all of theirs at once, and are waited for in the end. Raises `InvalidRequest` naming the tensor.
        """
        devices: dict[str, Any] = {}
        taken: list[NamedTensor] = []
        for name, value in _pairs(tensors):
            part = _part(name, value, first)
            if part is not None:
                if _on_gpu(part.local):
                    taken.append(self._from_gpu(len(taken), name, part, devices))
                else:
                    taken.append(self._from_host(len(taken), name, part))
        for device in devices.values():
            sys.modules["torch"].cuda.synchronize(device)
        del self._buffers[len(taken) :], self._pinned[len(taken) :]
        self.tensors = tuple(taken)

    @property
    def room(self) -> list[tuple[int, bool]]:
        """The bytes of each tensor's memory, and whether it is for a GPU to write to."""
        return [(len(buffer), pinned) for buffer, pinned in zip(self._buffers, self._pinned, strict=True)]

    def make_room(self, room: Sequence[tuple[int, bool]]) -> None:
        """Have such memory, so that the next `take` need not wait for it."""
        for place, (size, pinned) in enumerate(room):
            self._buffer(place, size, pinned=pinned).fill(0)  # memory is there once it is written to

    def _from_host(self, place: int, name: str, part: Part) -> NamedTensor:
        found = named_tensor(name, part.local)
        buffer = self._buffer(place, found.data.nbytes, pinned=False)
        np.copyto(buffer, np.frombuffer(found.data, np.uint8))
        start, full = (found.start, found.full) if isinstance(part.local, NamedTensor) else (part.start, part.full)
        return NamedTensor(
            name=found.name, dtype=found.dtype, shape=found.shape, data=buffer.data, start=start, full=full
        )

    def _from_gpu(self, place: int, name: str, part: Part, devices: dict[str, Any]) -> NamedTensor:
        torch, value = sys.modules["torch"], part.local.detach()
        if str(value.device) not in devices:
            torch.cuda.synchronize(value.device)  # what is to be copied may be made on any stream
            devices[str(value.device)] = value.device
        flat = value.contiguous().reshape(-1).view(torch.uint8)
        buffer = self._buffer(place, flat.numel(), pinned=True)
        torch.from_numpy(buffer).copy_(flat, non_blocking=True)
        return NamedTensor(
            name=name,
            dtype=dtype_name(str(value.dtype), field=name),
            shape=tuple(value.shape),
            data=buffer.data,
            start=part.start,
            full=part.full,
        )

    def _buffer(self, place: int, size: int, *, pinned: bool) -> Bytes:
        if place == len(self._buffers):
            self._buffers.append(np.empty(0, np.uint8))
            self._pinned.append(False)
        if (len(self._buffers[place]), self._pinned[place]) != (size, pinned):
            self._buffers[place] = np.empty(0, np.uint8)  # so that not both are there at once
            self._buffers[place], self._pinned[place] = _allocate(size, pinned=pinned), pinned
        return self._buffers[place]


def _pairs(tensors: Tensors) -> Iterator[tuple[str, Any]]:
    for item in tensors.items() if isinstance(tensors, Mapping) else tensors:
        match item:
            case NamedTensor():
                yield item.name, item
            case (str(name), value):
                yield name, value
            case _:
                text = f"must be NamedTensors or pairs of name and tensor, not {type(item).__name__}"
                raise InvalidRequest(text, field="tensors")


def _part(name: str, value: Any, first: bool) -> Part | None:
    if is_sharded(value):
        return own_part(name, value)
    piece = isinstance(value, NamedTensor) and bool(value.full)
    return Part(value) if first or piece else None


def _on_gpu(value: Any) -> bool:
    return getattr(getattr(value, "device", None), "type", "") == "cuda"


def _allocate(size: int, *, pinned: bool) -> Bytes:
    """Memory; with `pinned` in locked pages where they are to be had, which a GPU writes to by itself.

    torch's own pinned memory is rounded up to powers of two: too much, for whole models.
    """
    if not pinned or size < _PINNED_BYTES:
        return np.empty(size, np.uint8)
    buffer = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    runtime, address = sys.modules["torch"].cuda.cudart(), buffer.ctypes.data
    if int(runtime.cudaHostRegister(address, size, 0)) == 0:
        weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    return buffer
