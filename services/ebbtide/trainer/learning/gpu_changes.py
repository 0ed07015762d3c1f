"""Keeps the last published bits of tensors on a GPU and compares them there, so that only changes cross the bus.

It uses plain torch operations, the same on any device. `ebbtide.weights.version_encoding` encodes the changes on the
host. A tile comes to the host as a whole if its changes would take more bytes.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights.patch import Array
from ebbtide.weights.version_encoding import Found

#: unit's width -> torch's integer. Differences wrap as in unsigned ones, which torch hardly supports.
_UNITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}
#: Bytes compared at once. Temporary memory on the device is a few times this, for tensors of any size.
_STRIDE: Final = 64 * TILE_BYTES
#: Share of a GPU's memory left to the trainer, whose longest sequences may still come.
_LEFT: Final = 0.1


class KeptTensors:
    """A `Keeper` of tensors to publish: those on a device stay there as they were published last."""

    def __init__(self, read: Callable[[], Iterable[tuple[str, Tensor]]], device: str = "cuda") -> None:
        self._read, self._device = read, device

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._read())

    def keep(self, tensor: Any) -> "KeptTensor | None":
        """Returns None for a tensor on another device, or if memory runs out."""
        if not isinstance(tensor, Tensor) or tensor.device.type != self._device:
            return None
        try:
            return KeptTensor(tensor)
        except torch.OutOfMemoryError:
            return None


class KeptTensor:
    """A `Kept`.

    Invariant: `_bits` is a copy of the tensor that was compared last. `_pending` are the tiles that `fetch` must bring
    over: at first, all of them.
    """

    def __init__(self, tensor: Tensor, tile_bytes: int = TILE_BYTES) -> None:
        """Raises `torch.OutOfMemoryError`."""
        self._kind, self._tile_bytes = _kind(tensor), tile_bytes
        self._bits = _units(tensor).clone()
        none, tiles = self._bits[:0], -(-self._bits.nbytes // tile_bytes)
        self._pending = [_Looked(none, none, [None] * tiles)]

    def follow(self, tensor: Tensor) -> bool:
        if _kind(tensor) != self._kind:
            return False
        try:
            new = _units(tensor)
            tile = self._tile_bytes // new.element_size()
            step = max(_STRIDE // self._tile_bytes, 1) * tile
            strides = (slice(start, start + step) for start in range(0, new.numel(), step))
            self._pending = [_look(self._bits[part], new[part], tile) for part in strides]
        except torch.OutOfMemoryError:
            return False
        self._bits.copy_(new)
        return True

    def fetch(self, into: np.ndarray[Any, np.dtype[np.uint8]]) -> Found:
        found: list[tuple[Array, Array] | None] = []
        target, source = torch.from_numpy(into), self._bits.view(torch.uint8)
        with _beside(self._bits.device):
            for looked in self._pending:
                found += looked.fetch()
            for number, changes in enumerate(found):
                if changes is None:
                    tile = slice(number * self._tile_bytes, (number + 1) * self._tile_bytes)
                    target[tile].copy_(source[tile], non_blocking=True)
        self._pending = []
        return found


class _Looked(NamedTuple):
    """The changes of some tiles."""

    positions: Tensor
    differences: Tensor
    counts: list[int | None]  # of each tile; None: it comes as a whole

    def fetch(self) -> Iterator[tuple[Array, Array] | None]:
        positions, differences, first = _host(self.positions), _host(self.differences), 0
        for count in self.counts:
            part = slice(first, first + (count or 0))
            yield None if count is None else (positions[part], differences[part])
            first = part.stop


def _look(base: Tensor, new: Tensor, tile_units: int) -> _Looked:
    positions, differences, counts = find_changes(base, new, tile_units)
    per_tile, width = counts.tolist(), new.element_size()
    sizes = (min(tile_units, new.numel() - start) for start in range(0, new.numel(), tile_units))
    kept = [
        count if count * (4 + width) < size * width or not count else None
        for count, size in zip(per_tile, sizes, strict=True)
    ]
    if None in kept:
        few = torch.tensor([count is not None for count in kept], device=new.device)
        chosen = torch.repeat_interleave(few, counts)
        positions, differences = positions[chosen], differences[chosen]
    return _Looked(positions, differences, kept)


def find_changes(base: Tensor, new: Tensor, tile_units: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each change's position in its tile (int32) and difference, and each tile's count, of flat integers.

    All are on the tensors' device, tile by tile, ascending. Waits for the device, as the count decides on memory.
    """
    positions, differences = _compare(base, new)
    tiles = -(-new.numel() // tile_units)
    ends = torch.arange(1, tiles + 1, device=new.device) * tile_units
    bounds = torch.searchsorted(positions, ends)  # they ascend
    counts = torch.diff(bounds, prepend=bounds.new_zeros(1))
    return (positions % tile_units).to(torch.int32), differences, counts


def has_room(tensors: Iterable[tuple[str, Tensor]], device: str) -> bool:
    """Whether a GPU has room for another copy of the tensors, and for changes of as many bytes.

    Call it after a step, when the memory that training takes is known.
    """
    if not device.startswith("cuda"):
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free - 2 * sum(tensor.nbytes for _, tensor in tensors) >= _LEFT * total


def _compare(base: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Returns positions (int64, ascending) and differences of all changes.

    Compares words of 8 bytes first, then the units of unequal words: so comparing writes, and compacting reads twice, a
    byte for each word instead of each unit.
    """
    width, ends = new.element_size(), (base.storage_offset(), new.storage_offset(), new.numel())
    if any(end * width % 8 for end in ends):
        positions = torch.nonzero(base != new).view(-1)
        return positions, new[positions] - base[positions]
    old, young = base.view(torch.int64), new.view(torch.int64)
    words = torch.nonzero(old != young).view(-1)
    differences = young[words].view(new.dtype) - old[words].view(new.dtype)
    inner = torch.nonzero(differences).view(-1)
    units = 8 // width
    return words[inner // units] * units + inner % units, differences[inner]


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Uses a separate GPU stream, so that copies neither wait for the trainer's next step nor delay it."""
    if device.type != "cuda":
        yield
        return
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    return tensor.dtype, tensor.shape, tensor.device


def _units(tensor: Tensor) -> Tensor:
    """Returns the bits, flat; copies a tensor with gaps in memory."""
    return tensor.detach().contiguous().view(-1).view(_UNITS[min(tensor.element_size(), 4)])


def _host(units: Tensor) -> Array:
    """Returns units or positions on the host, unsigned for the codec."""
    array = units.cpu().numpy()
    return array.view(f"<u{array.itemsize}")
