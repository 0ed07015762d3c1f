"""Encodes, checks, applies and composes the patches of one tile."""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from types import ModuleType
from typing import Final

import numpy as np

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import TILE_BYTES
from ebbtide.weights.patch.alphabet import Array, alphabet
from ebbtide.weights.patch.frames import Frames
from ebbtide.weights.patch.tile_format import (
    MAX_PARTS,
    SPARSE_HEAD,
    Bytes,
    Kind,
    TilePatch,
    read_series,
    read_tile,
    write_tile,
)

#: If fewer than one unit in so many changes, XOR and PACKED can only win if the changes are regular.
_CROWDED: Final = 16


class TileCodec:
    """Handles patches of tiles of up to `tile_bytes`, for one thread at a time; each thread has its own codec.

    Invariant: a tile patch is applied to a target whole or not at all. Only the memory of the scratch stays between
    calls: at most 6 times `tile_bytes` (10 for units of one byte), and about 2 MiB of zstd's. No call allocates more
    than 3 times `tile_bytes` besides, whatever a patch says; but numpy's kernels, used instead of numba's if `compiled`
    is False, need 144 bytes for every unit that changes.
    """

    def __init__(self, width: int, tile_bytes: int = TILE_BYTES, *, compiled: bool | None = None) -> None:
        if width not in {1, 2, 4} or not 1 <= tile_bytes <= TILE_BYTES:
            raise InvalidRequest(f"units have 1, 2 or 4 bytes, and tiles at most {TILE_BYTES}", field="width")
        self._kernels = _kernels(compiled)
        self._letters = alphabet(width)
        self._dtype = np.dtype(f"<u{width}")
        self._frames = Frames()
        self._units = units = tile_bytes // width
        self._positions = np.empty(units, np.uint32)
        self._differences = np.empty(units, self._dtype)
        self._symbols = np.empty(units, np.uint8)
        self._raw = np.empty(self._letters.raw_bytes(units) + 8, np.uint8)
        self._raw_view = self._raw.data  # made once: a tile costs microseconds

    def encode(self, base: Array, new: Array) -> bytes:
        """Return the smallest tile patch from `base` to `new`: flat contiguous unsigned units, of one length."""
        self._check_units(base, "base")
        self._check_units(new, "new")
        if len(base) != len(new):
            raise InvalidRequest(f"has {len(new)} units where its base has {len(base)}", field="new")
        changes, payload = self._sparse(base, new)
        if not changes:
            return self._write(Kind.SAME, len(new))
        kind, size = Kind.SPARSE, sum(len(part) for part in payload)
        if changes * _CROWDED > len(new) or _regular(changes, payload):
            blocks = ((Kind.XOR, lambda part: base[part] ^ new[part]), (Kind.PACKED, lambda part: new[part]))
            for other, block in blocks:
                if (frame := self._frames.pack_below(block, len(new), size)) is not None:
                    kind, payload, size = other, [frame], len(frame)
        if size >= new.nbytes:
            kind, payload = Kind.DENSE, [new.tobytes()]
        return self._write(kind, len(new), *payload)

    def check(self, patch: Bytes, units: int) -> None:
        """Raise `InvalidRequest` unless `patch` is whole and made for a tile of `units` units."""
        for part in self._parts(patch, units):
            self._check(part)

    def apply(self, patch: Bytes, into: Array) -> None:
        """Turn the base in `into` (flat contiguous unsigned units) into the new tile, in place.

        Raises `InvalidRequest`, with `into` unchanged, unless the patch is whole and made for such a tile. Only digests
        show whether `into` is the right base.
        """
        self._check_units(into, "into")
        if not into.flags.writeable:
            raise InvalidRequest("cannot be written", field="into")
        parts = self._parts(patch, len(into))
        if len(parts) > 1:
            self.check(patch, len(into))
        for part in parts:
            self._add(into, part)

    def encode_changes(self, positions: Array, differences: Array, units: int) -> bytes | None:
        """Return the SPARSE (or SAME) tile patch of changes found elsewhere, for example on a GPU.

        `positions` are ascending integers, `differences` units: new - base modulo 2^bits, with or without those of 0.
        None if the changes are so regular, or so many, that another kind is probably smaller: `encode` the tile then.
        """
        self._check_units(differences, "differences")
        bounds = len(positions) and (
            positions[0] < 0 or positions[-1] >= units or not np.all(positions[:-1] < positions[1:])
        )
        if positions.shape != differences.shape or units > self._units or bounds:
            raise InvalidRequest(f"must ascend within {units} units, one for each difference", field="positions")
        changes, payload = self._payload(self._kernels.code_changes, positions, differences)
        if not changes:
            return self._write(Kind.SAME, units)
        if _regular(changes, payload) or 2 * sum(map(len, payload)) > units * self._dtype.itemsize:
            return None
        return self._write(Kind.SPARSE, units, *payload)

    def compose(self, patches: Sequence[Bytes], units: int) -> bytes:
        """Return one tile patch with the effect of `patches` in order, without the changes that they undo.

        Differences add up modulo 2^bits, XORs combine by XOR, and a dense tile replaces everything before it; adjacent
        XOR and SPARSE patches stay side by side in a series. Raises `InvalidRequest` as `check` does, and for a series
        of more than 16 parts: take an anchor then.
        """
        for patch in patches:
            self.check(patch, units)
        parts = [part for patch in patches for part in self._parts(patch, units)]
        last = max((index for index, part in enumerate(parts) if part.kind in {Kind.DENSE, Kind.PACKED}), default=None)
        if last is not None:
            return self._write_dense(self._total(parts[last:], units))
        joined = [self._join(kind, list(group), units) for kind, group in groupby(parts, key=lambda part: part.kind)]
        joined = [patch for patch in joined if read_tile(patch, self._dtype.itemsize, units).kind != Kind.SAME]
        if len(joined) > MAX_PARTS:
            raise InvalidRequest(f"would be a series of {len(joined)} parts: take an anchor", field="patches")
        if len(joined) > 1:
            return self._write(Kind.SERIES, units, *joined)
        return joined[0] if joined else self._write(Kind.SAME, units)

    def _join(self, kind: Kind, parts: Sequence[TilePatch], units: int) -> bytes:
        if len(parts) == 1:
            return self._write(kind, units, parts[0].payload)
        total = self._total(parts, units)
        if not total.any():
            return self._write(Kind.SAME, units)
        if kind == Kind.SPARSE:
            return self._write(kind, units, *self._sparse(np.zeros_like(total), total)[1])
        return self._write(kind, units, self._frames.pack(total))

    def _total(self, parts: Sequence[TilePatch], units: int) -> Array:
        total = np.zeros(units, self._dtype)
        for part in parts:
            self._add(total, part)
        return total

    def _sparse(self, base: Array, new: Array) -> tuple[int, list[Bytes]]:
        return self._payload(self._kernels.code, base, new)

    def _payload(self, code: Callable[..., tuple[int, int]], *units: Array) -> tuple[int, list[Bytes]]:
        """Return the number of changes, and the payload of kind SPARSE: its head, its symbols' frame, its raw bits."""
        count, bits = code(*units, self._letters, self._symbols, self._raw)
        frame = self._frames.pack_symbols(self._symbols[:count])
        return count, [SPARSE_HEAD.pack(count, len(frame)), frame, self._raw_view[: (bits + 7) >> 3]]

    def _write_dense(self, new: Array) -> bytes:
        frame = self._frames.pack_below(lambda part: new[part], len(new), new.nbytes)
        return self._write(Kind.DENSE if frame is None else Kind.PACKED, len(new), frame or new.tobytes())

    def _write(self, kind: Kind, units: int, *payload: Bytes) -> bytes:
        return write_tile(kind, self._dtype.itemsize, units, *payload)

    def _parts(self, patch: Bytes, units: int) -> list[TilePatch]:
        """Return a series' parts, nothing for SAME, or the patch itself for other kinds. Headers are checked."""
        if units > self._units:
            raise InvalidRequest(f"has {units} units, more than {self._units}", field="tile")
        tile = read_tile(patch, self._dtype.itemsize, units)
        if tile.kind == Kind.SAME and len(tile.payload):
            raise InvalidRequest("has kind SAME, but also a payload", field="patch")
        if tile.kind == Kind.SERIES:
            return read_series(tile)
        return [] if tile.kind == Kind.SAME else [tile]

    def _add(self, into: Array, part: TilePatch) -> None:
        if part.kind == Kind.SPARSE:
            self._run(self._kernels.apply, part, into)
        elif part.kind == Kind.XOR:
            np.bitwise_xor(into, self._block(part), out=into)
        else:
            into[:] = self._block(part)

    def _check(self, part: TilePatch) -> None:
        if part.kind == Kind.SPARSE:
            self._run(self._kernels.decode, part, part.units)
        else:
            self._block(part)

    def _block(self, part: TilePatch) -> Array:
        size = part.units * part.width
        if part.kind == Kind.DENSE and len(part.payload) != size:
            raise InvalidRequest(f"has {len(part.payload)} bytes of {size}", field="patch")
        block = part.payload if part.kind == Kind.DENSE else self._frames.unpack(part.payload, size)
        return np.frombuffer(block, self._dtype)

    def _run(self, kernel: Callable[..., bool], part: TilePatch, target: Array | int) -> None:
        symbols, raw, limit = self._read_sparse(part)
        if not kernel(symbols, raw, limit, self._letters, target, (self._positions, self._differences)):
            raise InvalidRequest("has changes out of range, or not as many as it says", field="patch")

    def _read_sparse(self, part: TilePatch) -> tuple[Array, Array, int]:
        """Return the symbols, the raw bits (in the scratch, which has room for any symbols' bits), and their number."""
        payload, head = part.payload, SPARSE_HEAD.size
        if len(payload) < head:
            raise InvalidRequest("ends within the head of its changes", field="patch")
        count, size = SPARSE_HEAD.unpack_from(payload)
        length = len(payload) - head - size
        if not 1 <= count <= min(part.units, self._units) or not 0 <= length <= self._letters.raw_bytes(count):
            raise InvalidRequest(f"{count} changes do not fit their bytes or their tile", field="patch")
        symbols = np.frombuffer(self._frames.unpack(payload[head : head + size], count), np.uint8)
        self._raw_view[:length] = payload[head + size :]
        return symbols, self._raw, 8 * length

    def _check_units(self, units: Array, field: str) -> None:
        if units.dtype != self._dtype or units.ndim != 1 or not units.flags.c_contiguous or len(units) > self._units:
            text = f"must be at most {self._units} units of {self._dtype.itemsize} bytes, flat and contiguous"
            raise InvalidRequest(text, field=field)


def _regular(changes: int, payload: Sequence[Bytes]) -> bool:
    """Tell whether the symbols' frame has less than 2 bits a change; random changes need more."""
    return len(payload[1]) * 4 < changes


def warm_up() -> None:
    """Compile or load the kernels for all widths. The first time on a host takes seconds: call it in a thread."""
    for width in (1, 2, 4):
        codec, base = TileCodec(width), np.zeros(64, f"<u{width}")
        codec.apply(codec.encode(base, base + np.array(1, base.dtype)), base)
        codec.encode_changes(np.zeros(1, np.uint32), base[:1], len(base))


def _kernels(compiled: bool | None) -> ModuleType:
    """Import numba's kernels or numpy's, which give the same bytes. Late, because importing numba takes a second."""
    if compiled is None:
        compiled = find_spec("numba") is not None
    return import_module(f"ebbtide.weights.patch.{'compiled' if compiled else 'numpy'}_kernels")
