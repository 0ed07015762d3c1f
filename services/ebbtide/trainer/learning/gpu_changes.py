"""The last published bits of tensors on a GPU: compared and compacted there, so that only what changed crosses the bus.

Plain torch operations, the same on any device. What changed is coded on the host, by
`ebbtide.weights.version_encoding`. A tile of which so much changed that its changes are more bytes than itself comes
to the host whole.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights.found_changes import Found
from ebbtide.weights.patch.alphabet import Array

#: torch's integer of a unit's width. Differences wrap in them as in the unsigned ones, which torch knows half of.
_UNITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}
#: Bytes compared at once: temporary memory on the device is a few times this, however large the tensor.
_STRIDE: Final = 64 * TILE_BYTES
#: Share of a GPU's memory that is left to the trainer, whose longest sequences may be still to come.
_LEFT: Final = 0.1


class KeptTensors:
    """A `Keeper`: tensors to publish, of which those on a device stay there as they were published last."""

    def __init__(self, read: Callable[[], Iterable[tuple[str, Tensor]]], device: str = "cuda") -> None:
        self._read, self._device = read, device

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._read())

    def keep(self, tensor: Any) -> "KeptTensor | None":
        """None for what lies elsewhere, or where memory has run out."""
        if not isinstance(tensor, Tensor) or tensor.device.type != self._device:
            return None
        try:
            return KeptTensor(tensor)
        except torch.OutOfMemoryError:
            return None


class KeptTensor:
    """A `Kept`.

    Invariant: `_bits` are those of the tensor that was looked at last, and of no other memory. `_pending` is what
    `fetch` is to bring over of them: at first, all tiles.
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
    """Some tiles' changes, and how many of them each tile has: None for one that comes whole."""

    positions: Tensor
    differences: Tensor
    counts: list[int | None]

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
    """Changes of flat integer tensors: position in its tile (int32) and difference of each, and how many each tile has.

    All on the tensors' device; tile by tile, ascending. Waits for the device, as how many there are decides on memory.
    """
    positions, differences = _compare(base, new)
    tiles = -(-new.numel() // tile_units)
    ends = torch.arange(1, tiles + 1, device=new.device) * tile_units
    bounds = torch.searchsorted(positions, ends)  # they ascend
    counts = torch.diff(bounds, prepend=bounds.new_zeros(1))
    return (positions % tile_units).to(torch.int32), differences, counts


def has_room(tensors: Iterable[tuple[str, Tensor]], device: str) -> bool:
    """Whether a GPU's memory, as training leaves it, has room for another copy of the tensors, and for changes that are
    as many bytes again. Ask after a step: before it, it is not known what training takes."""
    if not device.startswith("cuda"):
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free - 2 * sum(tensor.nbytes for _, tensor in tensors) >= _LEFT * total


def _compare(base: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (int64, ascending) and differences of all changes.

    Words of 8 bytes are compared first, as most are equal, and the units of those that are not then: what comparing
    writes, and compacting reads twice, is a byte for each word and not for each unit.
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
    """On a GPU: a stream of its own, so that copies neither wait for the trainer's next step nor hold it up."""
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
    """The bits, flat; a tensor that lies in memory with gaps is copied."""
    return tensor.detach().contiguous().view(-1).view(_UNITS[min(tensor.element_size(), 4)])


def _host(units: Tensor) -> Array:
    """The units, unsigned as the codec wants them; positions too."""
    array = units.cpu().numpy()
    return array.view(f"<u{array.itemsize}")
