"""Copies of a trainer's tensors in this process's memory, so that it may go on while they are published.

A trainer whose tensors lie on a GPU may keep the last published bits there too (`TensorKeeper`): then what changed is
found there, and nothing else is copied, once the trainer has gone on.

torch is not imported: who has tensors of it has it already.
"""

import contextlib
import mmap
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from ebbtide.errors import InvalidRequest
from ebbtide.weights import NamedTensor, named_tensor
from ebbtide.weights.dtypes import dtype_name
from ebbtide.weights.found_changes import Found, apply_found
from ebbtide.weights.geometry.sharded_tensors import Part, is_sharded, own_part

#: Tensors by name, or pairs of name and tensor; read once, one tensor at a time.
Tensors = Mapping[str, Any] | Iterable[NamedTensor | tuple[str, Any]]

#: Smaller tensors are not worth locked pages of their own; a GPU's copy of one takes microseconds.
_PINNED_BYTES: Final = 1 << 16
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class KeptCopies(Protocol):
    """The bits that a tensor had when it was looked at last, where it lies."""

    def follow(self, tensor: Any) -> bool:
        """Find what changed, and have the bits of `tensor`. False where that cannot be: this is of no use then."""

    def fetch(self, into: Bytes) -> Found:
        """Once the tensor may change again: what was found; and tiles of which None is said there, put in `into`."""


@runtime_checkable
class TensorKeeper(Protocol):
    """Tensors whose bits are kept where they lie: an iterable of names and tensors to `Publisher.publish`."""

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...

    def keep(self, tensor: Any) -> KeptCopies | None:
        """A first copy of `tensor`; None if that cannot be."""


class TensorSnapshot:
    """Memory for one version, taken anew or again by each `take`.

    Invariant: `tensors` are those of the last `take` that returned, and change with the next; until `fetch` returns,
    they are not whole. What is `_kept` has the bits of the last `take`; who follows takes it away. The memory stays for
    as long as this does, and is as much as the largest tensors that stood in each place.
    """

    def __init__(self) -> None:
        self.tensors: tuple[NamedTensor, ...] = ()
        self._buffers: list[Bytes] = []
        self._pinned: list[bool] = []
        self._kept: dict[int, KeptCopies] = {}
        self._before: dict[int, tuple[KeptCopies, Bytes]] = {}  # for the next `take`, with the bits on the host
        self._origins: dict[int, Bytes] = {}  # of those that followed, until they are fetched

    def give_up(self) -> dict[int, tuple[KeptCopies, Bytes]]:
        """What keeps each tensor's bits, and where they are on the host: not for this one any more."""
        kept, self._kept = self._kept, {}
        return {place: (one, self._buffers[place]) for place, one in kept.items()}

    def follow(self, before: dict[int, tuple[KeptCopies, Bytes]]) -> None:
        """Have the next `take` look for changes of what another gave up, which must not change until its `fetch`."""
        self._before = before

    def take(self, tensors: Tensors, *, first: bool = True) -> None:
        """Copy `tensors`. Of sharded ones, what this process publishes of them; whole ones only for the `first`.

        A `TensorKeeper`'s are only looked at. GPUs do all of theirs at once, and are waited for in the end.
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
                except (RuntimeError, NotImplementedError) as error:  # torch's: of sparse ones, of no memory, ...
                    raise InvalidRequest(f"its elements cannot be read ({error})", field=name) from None
        for device in devices.values():
            sys.modules["torch"].cuda.synchronize(device)
        del self._buffers[len(taken) :], self._pinned[len(taken) :]
        self.tensors = tuple(taken)

    def fetch(self) -> list[Found | None]:
        """Have whole what was only looked at, by the changes that were found. Returns those, for each of `tensors`."""
        found: list[Found | None] = [None] * len(self.tensors)
        for place, kept in self._kept.items():
            changes = kept.fetch(self._buffers[place])
            if (origin := self._origins.pop(place, None)) is not None:
                apply_found(changes, origin, self._buffers[place])
                found[place] = changes
        return found

    @property
    def room(self) -> list[tuple[int, bool]]:
        """The bytes of each tensor's memory, and whether it is for a GPU to write to."""
        return [(len(buffer), pinned) for buffer, pinned in zip(self._buffers, self._pinned, strict=True)]

    def make_room(self, room: Sequence[tuple[int, bool]]) -> None:
        """Have such memory, so that the next `take` need not wait for it."""
        for place, (size, pinned) in enumerate(room):
            self._buffer(place, size, pinned=pinned).fill(0)  # memory is there once it is written to

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
        buffer = self._buffer(place, found.data.nbytes, pinned=False)
        np.copyto(buffer, np.frombuffer(found.data, np.uint8))
        start, full = (found.start, found.full) if isinstance(part.local, NamedTensor) else (part.start, part.full)
        return NamedTensor(
            name=found.name, dtype=found.dtype, shape=found.shape, data=buffer.data, start=start, full=full
        )

    def _from_gpu(self, place: int, name: str, part: Part) -> NamedTensor:
        torch, tensor = sys.modules["torch"], self._room_for(place, name, part)
        flat = part.local.detach().contiguous().reshape(-1).view(torch.uint8)
        torch.from_numpy(self._buffers[place]).copy_(flat, non_blocking=True)
        return tensor

    def _room_for(self, place: int, name: str, part: Part) -> NamedTensor:
        """torch's tensor, whose bits are still to be written into its memory."""
        value = part.local
        dtype = dtype_name(str(value.dtype), field=name)
        data = self._buffer(place, value.numel() * value.element_size(), pinned=_on_gpu(value)).data
        return NamedTensor(
            name=name, dtype=dtype, shape=tuple(value.shape), data=data, start=part.start, full=part.full
        )

    def _keep(self, place: int, value: Any, keeper: TensorKeeper, before: dict[int, tuple[KeptCopies, Bytes]]) -> bool:
        """Whether the tensor's bits are kept: by what kept them `before`, or else anew."""
        kept, origin = before.pop(place, (None, None))
        if kept is not None and origin is not None and kept.follow(value):
            self._kept[place], self._origins[place] = kept, origin
            return True
        del kept  # its memory is for the new one
        if (new := keeper.keep(value)) is not None:
            self._kept[place] = new
        return new is not None

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


def _settle(device: Any, devices: dict[str, Any]) -> None:
    """Wait for a device once: what is to be copied may be made on any of its streams."""
    if str(device) not in devices:
        sys.modules["torch"].cuda.synchronize(device)
        devices[str(device)] = device


def _on_gpu(value: Any) -> bool:
    return getattr(getattr(value, "device", None), "type", "") == "cuda"


def _allocate(size: int, *, pinned: bool) -> Bytes:
    """Memory; with `pinned` in locked pages where they are to be had, which a GPU writes to by itself.

    torch's own pinned memory is rounded up to powers of two: too much, for whole models.
    """
    if not pinned or size < _PINNED_BYTES:
        return np.empty(size, np.uint8)
    buffer = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    torch, address = sys.modules["torch"], buffer.ctypes.data
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, size, 0)) == 0:
        weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    else:
        _forget_error(torch)
    return buffer


def _forget_error(torch: Any) -> None:
    """CUDA keeps this thread's last error until someone asks, who would take it for that of the next kernel.

    torch asks behind each kernel that it starts, and does not say so by itself: start one.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
