"""Copies a trainer's tensors to this process's memory, so that the trainer can continue while they are published.

A trainer whose tensors lie on a GPU can keep the last published bits there too (`TensorKeeper`). The GPU then finds the
changes, and only these are copied, after the trainer has continued.

torch is not imported: callers with torch tensors have imported it.
"""

import contextlib
import mmap
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from msgspec.structs import replace

from ebbtide.errors import InvalidRequest
from ebbtide.weights import NamedTensor, named_tensor
from ebbtide.weights.tensors import Part, dtype_name, is_sharded, own_part
from ebbtide.weights.version_encoding import Found, apply_found

#: Tensors by name, or pairs of name and tensor; read once, one tensor at a time.
Tensors = Mapping[str, Any] | Iterable[NamedTensor | tuple[str, Any]]

#: Smaller tensors need no locked pages; copying one from a GPU takes microseconds.
_PINNED_BYTES: Final = 1 << 16
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class KeptCopies(Protocol):
    """Keeps a tensor's bits of the last publish on the tensor's own device."""

    def follow(self, tensor: Any) -> bool:
        """Find the changes since the last call and copy the bits of `tensor`. False if that is impossible: drop this
        object then."""

    def fetch(self, into: Bytes) -> Found:
        """Return the changes found; write to `into` the tiles whose changes are None. The tensor can change again."""


@runtime_checkable
class TensorKeeper(Protocol):
    """Iterates over names and tensors for `Publisher.publish`, and keeps bits where the tensors lie."""

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...

    def keep(self, tensor: Any) -> KeptCopies | None:
        """Make a first copy of `tensor`; None if that is impossible."""


class TensorSnapshot:
    """The memory of one version, which each `take` reuses.

    Invariant: `tensors` are those of the last `take` that returned, and change with the next; they are complete once
    `fetch` has returned. `_kept` has the bits of the last `take`, until the next snapshot takes it by `give_up`. The
    memory lasts as long as this object; `take` only replaces buffers whose size or kind differs.
    """

    def __init__(self) -> None:
        self.tensors: tuple[NamedTensor, ...] = ()
        self._buffers: list[Bytes] = []
        self._writers: list[str] = []  # the GPU that writes to each buffer, such as cuda:1; empty: none
        self._kept: dict[int, KeptCopies] = {}
        self._before: dict[int, tuple[KeptCopies, Bytes]] = {}  # for the next `take`, with their bits on the host
        self._origins: dict[int, Bytes] = {}  # the base's bits of tensors that followed, until `fetch`

    def give_up(self) -> dict[int, tuple[KeptCopies, Bytes]]:
        """Hand over the kept copies, with their tensors' bits on the host."""
        kept, self._kept = self._kept, {}
        return {place: (one, self._buffers[place]) for place, one in kept.items()}

    def follow(self, before: dict[int, tuple[KeptCopies, Bytes]]) -> None:
        """Make the next `take` seek changes from what another snapshot gave up; its bits stay fixed until `fetch`."""
        self._before = before

    def take(self, tensors: Tensors, *, first: bool = True) -> None:
        """Copy this process's part of sharded tensors; whole tensors only on the `first` process.

        A `TensorKeeper`'s tensors are only compared. GPUs work on all of theirs at once; the end waits for them.
        Raises `InvalidRequest` naming the tensor.
        """
        devices: dict[str, Any] = {}
        taken: list[NamedTensor] = []
        before, self._before, self._kept, self._origins = self._before, {}, {}, {}
        keeper = tensors if isinstance(tensors, TensorKeeper) else None
        for name, value in _pairs(tensors):
            part = _part(name, value, first)
            if part is not None:
                if _on_gpu(part.local):
                    _settle(part.local.device, devices)
                try:
                    taken.append(self._take(len(taken), name, part, keeper, before))
                except (RuntimeError, NotImplementedError) as error:  # torch's, for sparse tensors
                    if _is_device_fault(error):
                        raise
                    raise InvalidRequest(f"its elements cannot be read ({error})", field=name) from None
        for device in devices.values():
            sys.modules["torch"].cuda.synchronize(device)
        del self._buffers[len(taken) :], self._writers[len(taken) :]
        self.tensors = tuple(taken)

    def fetch(self) -> list[Found | None]:
        """Complete the tensors that were only compared, by their changes. Returns these for each of `tensors`."""
        found: list[Found | None] = [None] * len(self.tensors)
        for place, kept in self._kept.items():
            changes = kept.fetch(self._buffers[place])
            if (origin := self._origins.pop(place, None)) is not None:
                apply_found(changes, origin, self._buffers[place])
                found[place] = changes
        return found

    @property
    def room(self) -> list[tuple[int, str]]:
        """The bytes of each tensor's memory, and the GPU that writes to it, such as cuda:1; empty: none."""
        return [(len(buffer), writer) for buffer, writer in zip(self._buffers, self._writers, strict=True)]

    def make_room(self, room: Sequence[tuple[int, str]]) -> None:
        """Allocate such memory, so that the next `take` does not wait for it."""
        for place, (size, writer) in enumerate(room):
            self._buffer(place, size, writer).fill(0)  # the system provides memory at the first write

    def _take(
        self,
        place: int,
        name: str,
        part: Part,
        keeper: TensorKeeper | None,
        before: dict[int, tuple[KeptCopies, Bytes]],
    ) -> NamedTensor:
        if keeper is not None and self._keep(place, part.local, keeper, before):
            return self._room_for(place, name, part)
        return self._from_gpu(place, name, part) if _on_gpu(part.local) else self._from_host(place, name, part)

    def _from_host(self, place: int, name: str, part: Part) -> NamedTensor:
        found = named_tensor(name, part.local)
        buffer = self._buffer(place, found.data.nbytes, "")
        np.copyto(buffer, np.frombuffer(found.data, np.uint8))
        start, full = (found.start, found.full) if isinstance(part.local, NamedTensor) else (part.start, part.full)
        return replace(found, data=buffer.data, start=start, full=full)

    def _from_gpu(self, place: int, name: str, part: Part) -> NamedTensor:
        torch, tensor = sys.modules["torch"], self._room_for(place, name, part)
        flat = part.local.detach().contiguous().reshape(-1).view(torch.uint8)
        torch.from_numpy(self._buffers[place]).copy_(flat, non_blocking=True)
        return tensor

    def _room_for(self, place: int, name: str, part: Part) -> NamedTensor:
        """Describe a torch tensor, with memory for its bits."""
        value = part.local
        dtype = dtype_name(str(value.dtype), field=name)
        writer = str(value.device) if _on_gpu(value) else ""
        data = self._buffer(place, value.numel() * value.element_size(), writer).data
        return NamedTensor(
            name=name, dtype=dtype, shape=tuple(value.shape), data=data, start=part.start, full=part.full
        )

    def _keep(self, place: int, value: Any, keeper: TensorKeeper, before: dict[int, tuple[KeptCopies, Bytes]]) -> bool:
        """Keep the tensor's bits on its device, by the copies of `before` or new ones. False if that is impossible."""
        kept, origin = before.pop(place, (None, None))
        if kept is not None and origin is not None and kept.follow(value):
            self._kept[place], self._origins[place] = kept, origin
            return True
        del kept  # frees its memory for the new one
        if (new := keeper.keep(value)) is not None:
            self._kept[place] = new
        return new is not None

    def _buffer(self, place: int, size: int, writer: str) -> Bytes:
        if place == len(self._buffers):
            self._buffers.append(np.empty(0, np.uint8))
            self._writers.append("")
        if (len(self._buffers[place]), self._writers[place]) != (size, writer):
            self._buffers[place] = np.empty(0, np.uint8)  # frees the old memory first
            self._buffers[place], self._writers[place] = allocate(size, writer), writer
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
    if isinstance(value, Part):
        return value
    if is_sharded(value):
        return own_part(name, value)
    piece = isinstance(value, NamedTensor) and bool(value.full)
    return Part(value) if first or piece else None


def _is_device_fault(error: Exception) -> bool:
    """Whether the device failed, or is full, whatever tensor was read."""
    torch = sys.modules.get("torch")
    kinds = (getattr(torch, name, ()) for name in ("OutOfMemoryError", "AcceleratorError"))  # the latter since 2.8
    return isinstance(error, tuple(kinds))


def _settle(device: Any, devices: dict[str, Any]) -> None:
    """Wait for a device once, because any of its streams can still write the tensors to copy."""
    if str(device) not in devices:
        sys.modules["torch"].cuda.synchronize(device)
        devices[str(device)] = device


def _on_gpu(value: Any) -> bool:
    return getattr(getattr(value, "device", None), "type", "") == "cuda"


def allocate(size: int, writer: str) -> Bytes:
    """Allocate memory; for a GPU `writer` if possible in locked pages, which it writes to by itself.

    torch rounds its own pinned memory up to powers of two, which is too much for whole models.
    """
    if not writer or size < _PINNED_BYTES:
        return np.empty(size, np.uint8)
    buffer = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    torch, address = sys.modules["torch"], buffer.ctypes.data
    # A thread begins with device 0 selected, where the call would open a context: on a GPU that is another rank's.
    with torch.cuda.device(writer):
        if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:
            weakref.finalize(buffer, _unlock, torch, address, writer)
        else:
            _forget_error(torch)
    return buffer


def _unlock(torch: Any, address: int, writer: str) -> None:
    """Release locked pages, in whatever thread the last user of a buffer ends."""
    with torch.cuda.device(writer):
        torch.cuda.cudart().cudaHostUnregister(address)


def _forget_error(torch: Any) -> None:
    """Clear this thread's last CUDA error, which torch would blame on the next kernel of the selected device.

    torch has no call for that, but reads the error after each kernel that it starts: start one.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
