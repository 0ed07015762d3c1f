"""Patches from an enemy: refused, without harm to the target, without a crash, without memory."""

import struct
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zstandard

from ebbtide.errors import InvalidRequest
from ebbtide.weights import tile_digest
from ebbtide.weights.patch import SPARSE_HEAD, TILE_HEAD, Frames, Kind, TileCodec, alphabet, read_tile, write_tile
from tests.unit.weights.patch.changes import Array, changed, units

Codecs = Callable[[int], TileCodec]
UNITS = 700
#: What a tile of 700 units may cost to refuse: temporary arrays of numpy's kernels, not what a patch asks for.
BOUND = 1 << 20


def seeds(codec: TileCodec, width: int) -> Iterator[tuple[Array, bytes]]:
    """Base tiles and good patches of every kind."""
    base = units(width, UNITS)
    one = np.array(1, base.dtype)
    few, some, many = changed(base, 0.006), changed(base, 0.05), changed(base, 0.4, most=90)
    for new in (base, few, some, many, base ^ one, np.full_like(base, 9)):
        yield base, codec.encode(base, new)
    yield base, codec.encode(base, units(width, UNITS, 5))
    yield base, codec.compose([codec.encode(base, base ^ one), codec.encode(base, changed(base, 0.02))], UNITS)


def mutants(rng: np.random.Generator, patch: bytes, other: bytes, count: int) -> Iterator[bytes]:
    for _ in range(count):
        data = bytearray(patch)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(len(data))) if rng.random() < 0.5 else int(rng.integers(min(len(data), 30)))
            match int(rng.integers(6)):
                case 0:
                    data[at] ^= 1 << int(rng.integers(8))
                case 1:
                    data[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF]))
                case 2:
                    data = data[: max(at, 1)]
                case 3:
                    data[at:at] = rng.bytes(int(rng.integers(1, 9)))
                case 4:
                    del data[at : at + int(rng.integers(1, 9))]
                    data = data or bytearray(1)
                case _:
                    data[at:] = other[at:] or b"\0"
        if rng.random() < 0.7 and len(data) >= TILE_HEAD.size:  # let most of them come past the first check
            struct.pack_into("<I", data, 8, len(data) - TILE_HEAD.size)
        if bytes(data) != patch:
            yield bytes(data)


def outcome(codec: TileCodec, patch: bytes, base: Array) -> bytes | None:
    """The new tile, or None if the patch was refused and the target is as it was."""
    found = base.copy()
    try:
        codec.apply(patch, found)
    except InvalidRequest:
        assert np.array_equal(found, base)
        return None
    return found.tobytes()


@pytest.mark.parametrize("width", [1, 2, 4])
def test_mutants_are_refused_or_are_patches_that_say_what_they_do(width: int) -> None:
    """3,600 for each width; both kernels take and refuse the same ones, and digests leave none of them."""
    pytest.importorskip("numba")
    plain, compiled = TileCodec(width, compiled=False), TileCodec(width, compiled=True)
    rng, good = np.random.default_rng(width), list(seeds(plain, width))
    tried = taken = 0
    for base, patch in good:
        right = outcome(plain, patch, base)
        assert right is not None
        for mutant in mutants(rng, patch, good[int(rng.integers(len(good)))][1], 450):
            tried += 1
            found = outcome(compiled, mutant, base)
            assert found == outcome(plain, mutant, base)
            if found is None:
                continue
            taken += 1
            check_declared(plain, mutant, base, np.frombuffer(found, base.dtype))
            assert found == right or tile_digest(found) != tile_digest(right)
    assert tried > 3400
    assert taken < tried // 4


def check_declared(codec: TileCodec, patch: bytes, base: Array, new: Array) -> None:
    """What was accepted does what it declares, and no more."""
    tile = read_tile(patch, base.itemsize, len(base))
    assert len(new) == len(base) == tile.units
    if tile.kind == Kind.SPARSE:
        count, _ = SPARSE_HEAD.unpack_from(tile.payload)
        assert count == np.count_nonzero(base != new)
    if tile.kind == Kind.DENSE:
        assert new.tobytes() == bytes(tile.payload)


def sparse(width: int, symbols: list[int], raw: bytes = b"", count: int | None = None) -> bytes:
    frame = Frames().pack_symbols(np.array(symbols, "u1"))
    head = SPARSE_HEAD.pack(len(symbols) if count is None else count, len(frame))
    return write_tile(Kind.SPARSE, width, UNITS, head, frame, raw)


def frame_of(size: int, **options: int | bool) -> bytes:
    form = zstandard.ZstdCompressionParameters(format=zstandard.FORMAT_ZSTD1_MAGICLESS, **options)
    return zstandard.ZstdCompressor(compression_params=form).compress(bytes(size))


def bombs() -> Iterator[tuple[str, bytes]]:
    classes = 17
    huge = struct.pack("<BI", 0xA0, 0xFFFFFFFF) + frame_of(10)[2:]
    yield "a position behind the tile", sparse(2, [10 * classes], b"\xff\x01")
    yield "positions that add up to behind the tile", sparse(2, [8 * classes] * 10, bytes(9))
    yield "symbols that do not exist", sparse(2, [255])
    yield "a difference of nothing", sparse(2, [16], b"\xff\x7f")
    yield "more raw bits than are there", sparse(2, [16, 16], bytes(2))
    yield "raw bits that nobody reads", sparse(2, [0, 0], bytes(1))
    yield "padding that is not zero", sparse(2, [2 * classes], b"\x80")
    yield "no changes", sparse(2, [])
    yield "more changes than symbols", sparse(2, [0] * 5, count=6)
    yield "more changes than units", sparse(2, [0] * (UNITS + 1))
    yield "4 Gi changes", sparse(2, [0], count=(1 << 32) - 1)
    yield "a frame longer than the payload", write_tile(Kind.SPARSE, 2, UNITS, SPARSE_HEAD.pack(5, 99), b"\x20\x05")
    yield "no head", write_tile(Kind.SPARSE, 2, UNITS, b"\1\0\0")
    for kind in (Kind.XOR, Kind.PACKED):
        yield f"{kind.name} of 4 GiB", write_tile(kind, 2, UNITS, huge)
        yield f"{kind.name} that is short", write_tile(kind, 2, UNITS, frame_of(2 * UNITS - 1))
        yield f"{kind.name} that is long", write_tile(kind, 2, UNITS, frame_of(1 << 26))
        yield f"{kind.name} without its size", write_tile(kind, 2, UNITS, frame_of(1 << 26, write_content_size=False))
        yield f"{kind.name} and more", write_tile(kind, 2, UNITS, frame_of(2 * UNITS) + b"\0")
        yield f"{kind.name} twice", write_tile(kind, 2, UNITS, frame_of(2 * UNITS) * 2)
        yield f"{kind.name} with a checksum", write_tile(kind, 2, UNITS, frame_of(2 * UNITS, write_checksum=True))
        yield f"{kind.name} of nothing", write_tile(kind, 2, UNITS)
    xor = write_tile(Kind.XOR, 2, UNITS, frame_of(2 * UNITS))
    yield "17 parts", write_tile(Kind.SERIES, 2, UNITS, xor * 17)
    yield "one part", write_tile(Kind.SERIES, 2, UNITS, xor)
    yield "no part", write_tile(Kind.SERIES, 2, UNITS)
    yield "a series in a series", write_tile(Kind.SERIES, 2, UNITS, xor, write_tile(Kind.SERIES, 2, UNITS, xor * 2))
    yield "a part for another tile", write_tile(Kind.SERIES, 2, UNITS, xor, write_tile(Kind.XOR, 2, 9, frame_of(18)))
    yield "a broken last part", write_tile(Kind.SERIES, 2, UNITS, xor, sparse(2, [255]))
    yield "dense and short", write_tile(Kind.DENSE, 2, UNITS, bytes(2 * UNITS - 1))
    yield "dense and long", write_tile(Kind.DENSE, 2, UNITS, bytes(2 * UNITS + 1))
    yield "nothing, with a payload", write_tile(Kind.SAME, 2, UNITS, b"x")
    same = write_tile(Kind.SAME, 2, UNITS)
    yield "bytes behind the tile", same + b"x"
    for name, at, byte in (("format", 0, 2), ("kind", 1, 6), ("width", 2, 4), ("zero", 3, 1), ("units", 4, 1)):
        yield f"another {name}", same[:at] + bytes([byte]) + same[at + 1 :]
    yield from ((f"{length} bytes of a header", same[:length]) for length in range(TILE_HEAD.size))


@pytest.mark.parametrize(("name", "patch"), list(bombs()), ids=lambda value: value if isinstance(value, str) else "")
def test_bombs_are_refused_at_once_and_take_no_memory(codec_of: Codecs, name: str, patch: bytes) -> None:
    codec, base = codec_of(2), units(2, UNITS)
    assert outcome(codec, codec.encode(base, changed(base, 0.1)), base) is not None  # compiles the kernels
    tracemalloc.start()
    try:
        assert outcome(codec, patch, base) is None
        with pytest.raises(InvalidRequest, match="patch"):
            codec.check(patch, UNITS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < BOUND


@pytest.mark.parametrize("width", [1, 2, 4])
def test_every_symbol_with_the_largest_raw_bits_is_read_alike_and_in_bounds(width: int) -> None:
    pytest.importorskip("numba")
    plain, compiled = TileCodec(width, compiled=False), TileCodec(width, compiled=True)
    base, taken = units(width, UNITS), 0
    for symbol, entry in enumerate(alphabet(width).symbols.tolist()):
        bits = (entry & 255) + (entry >> 8 & 255)
        for field in (0, 1, (1 << bits) - 1):
            patch = sparse(width, [symbol], (field & (1 << bits) - 1).to_bytes((bits + 7) // 8, "little"))
            found = outcome(plain, patch, base)
            assert found == outcome(compiled, patch, base)
            taken += found is not None
    assert taken > 50


def test_a_tile_larger_than_the_scratch_is_refused_before_it_is_read(codec_of: Codecs) -> None:
    codec, base = codec_of(2), units(2, UNITS)
    small = TileCodec(2, UNITS, compiled=codec._kernels.__name__.endswith("compiled"))  # room for half as many units
    for new in (base, changed(base, 0.05), base ^ 1):
        patch = codec.encode(base, new)
        with pytest.raises(InvalidRequest, match="more than"):
            small.check(patch, UNITS)
        with pytest.raises(InvalidRequest, match="at most"):
            small.apply(patch, base.copy())
        with pytest.raises(InvalidRequest, match="more than"):
            small.compose([patch], UNITS)
    with pytest.raises(InvalidRequest, match="do not fit"):
        small._read_sparse(read_tile(sparse(2, [0] * UNITS), 2, UNITS))
