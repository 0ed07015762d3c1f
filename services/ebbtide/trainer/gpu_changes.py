"""Patches of tensors that lie on a GPU: compared and compacted there, so that only what changed crosses the bus.

Plain torch operations, the same on any device; the bytes are those of `ebbtide.weights.patch`, which codes the changes
on the host. Where so much changed, or so regularly, that another kind of tile patch may be smaller, the tile comes to
the host whole, base and new, to be encoded there.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights.dtypes import dtype_name
from ebbtide.weights.patch.alphabet import Array
from ebbtide.weights.patch.layout import checked_head
from ebbtide.weights.patch.tile import TileCodec

#: torch's integer of a unit's width. Differences wrap in them as in the unsigned ones, which torch knows half of.
_UNITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32}
#: Bytes compared at once: temporary memory on the device is a few times this, however large the tensor.
_STRIDE: Final = 64 * TILE_BYTES


def encode_changes(base: Tensor, new: Tensor, tile_bytes: int = TILE_BYTES) -> Iterator[bytes]:
    """The patch from `base` to `new`, contiguous tensors of one dtype, shape and device: header, then tile patches.

    Reads as `ebbtide.weights.patch.tensor.encode_patch` writes. Raises `InvalidRequest` if the tensors do not match.
    """
    if (base.dtype, base.shape, base.device) != (new.dtype, new.shape, new.device):
        raise InvalidRequest("has another dtype, shape or device than its base", field="new")
    head = checked_head(dtype_name(str(new.dtype), field="new"), new.numel(), tile_bytes)
    codec = TileCodec(head.width, tile_bytes)
    old, young = _units(base, head.width, "base"), _units(new, head.width, "new")
    yield head.to_bytes()
    step = max(_STRIDE // tile_bytes, 1) * (tile_bytes // head.width)
    for start in range(0, young.numel(), step):
        part = slice(start, start + step)
        yield from _encode(old[part], young[part], tile_bytes // head.width, codec)


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


def _encode(base: Tensor, new: Tensor, tile_units: int, codec: TileCodec) -> Iterator[bytes]:
    positions, differences, counts = find_changes(base, new, tile_units)
    per_tile = counts.tolist()
    width = new.element_size()
    if sum(per_tile) * (4 + width) > new.numel() * 2 * width:  # these would be more bytes than both versions
        positions, differences = positions[:0], differences[:0]
        per_tile = [None] * len(per_tile)
    found, values, first = _host(positions), _host(differences), 0
    for start, count in zip(range(0, new.numel(), tile_units), per_tile, strict=True):
        whole = slice(start, min(start + tile_units, new.numel()))
        patch = None
        if count is not None:
            part = slice(first, first + count)
            patch = codec.encode_changes(found[part], values[part], whole.stop - whole.start)
            first += count
        yield codec.encode(_host(base[whole]), _host(new[whole])) if patch is None else patch


def _units(tensor: Tensor, width: int, field: str) -> Tensor:
    if not tensor.is_contiguous():
        raise InvalidRequest("must lie in memory without gaps", field=field)
    return tensor.detach().view(-1).view(_UNITS[width])


def _host(units: Tensor) -> Array:
    """The units, unsigned as the codec wants them; positions too."""
    array = units.cpu().numpy()
    return array.view(f"<u{array.itemsize}")
