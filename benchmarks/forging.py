"""How manifests, patches and blobs are broken: as bad links do it, and as somebody does who has all but the key."""

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from ebbtide.types.weights import Manifest, Patch, TensorPatch
from ebbtide.weights import Signer, patched_tiles, root_digest, seal_patch

replace = msgspec.structs.replace
#: Somebody else's key.
_OTHER: Final = Signer(bytes(32))
#: Bytes of a tile here.
TILE: Final = 512


def broken_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flipped, cut, doubled, zeroed, stuffed or swapped somewhere."""
    out = bytearray(data)
    at = draw.randrange(len(out)) if out else 0
    span = draw.randint(1, 16)
    match draw.randrange(7):
        case 0:
            out[at] ^= 1 << draw.randrange(8)
        case 1:
            del out[at:]
        case 2:
            del out[at : at + span]
        case 3:
            out[at:at] = out[at : at + span]
        case 4:
            out[at : at + span] = bytes(len(out[at : at + span]))
        case 5:
            out[at:at] = draw.randbytes(span)
        case _:
            out[at : at + 4] = draw.choice((0xFFFFFFFF, 0x7FFFFFFF, 1 << 20, 0)).to_bytes(4, "little")
    return bytes(out)


def broken_parts(parts: Sequence[bytes], draw: random.Random) -> list[bytes]:
    """A part broken, left out, sent twice, or out of order."""
    out = list(parts)
    at, to = draw.randrange(len(out)), draw.randrange(len(out))
    match draw.randrange(5):
        case 0:
            del out[at]
        case 1:
            out.insert(to, out[at])
        case 2:
            out[at], out[to] = out[to], out[at]
        case _:
            out[at] = broken_bytes(out[at], draw)
    return out


_NAMES: Final = ("../x", "/etc/passwd", "", "a\0b", "x" * 600, "embed.weight", ".hidden")
_NUMBERS: Final = (0, 1, 3, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1)


def forged_manifest(manifest: Manifest, draw: random.Random) -> Manifest:
    """A field changed to something else, and the root made to fit: only the signature stands in the way."""
    tensors, version = list(manifest.tensors), manifest.version
    at = draw.randrange(len(tensors))
    entry = tensors[at]
    number = draw.choice(_NUMBERS)
    changes: list[Callable[[], Any]] = [
        lambda: replace(entry, name=draw.choice(_NAMES)),
        lambda: replace(entry, dtype=draw.choice(("F32", "F16", "F8_E4M3", "F128", ""))),
        lambda: replace(entry, shape=(number, *entry.shape[1:])),
        lambda: replace(entry, shape=entry.shape[::-1] + (1,) * draw.randrange(3)),
        lambda: replace(entry, size=number),
        lambda: replace(entry, digests=tuple(draw.sample(entry.digests, len(entry.digests)))),
        lambda: replace(entry, digests=(draw.randbytes(32), *entry.digests[1:])),
        lambda: replace(entry, start=(number,) * len(entry.shape), full=entry.full or entry.shape),
    ]
    tensors[at] = draw.choice(changes)()
    match draw.randrange(5):
        case 0:
            tensors = draw.sample(tensors, len(tensors))
        case 1:
            del tensors[draw.randrange(len(tensors))]
        case 2:
            field = draw.choice(("version", "parent", "step"))
            version = replace(version, **{field: min(number, (1 << 32) - 1)})
    changed = replace(manifest, tensors=tuple(tensors), version=version)
    try:
        version = replace(version, root=root_digest(changed))
    except Exception:  # noqa: BLE001 - a number that no root can hold
        return changed
    changed = replace(changed, version=version)
    return _OTHER.sign(changed) if draw.random() < 0.3 else changed


def forged_patch(patch: Patch, draw: random.Random) -> tuple[Patch, bool]:
    """A field changed, the root made to fit, and no signature, as if a relay had composed it; and whether its form
    forbids it. If not, it is for the digests of blobs and of what they make to tell."""
    at = draw.randrange(len(patch.tensors))
    item = patch.tensors[at]
    places = list(patched_tiles(item))
    sizes, digests = list(item.sizes), list(item.digests)
    if allowed := draw.random() < 0.2:
        match draw.randrange(3):
            case 0:
                sizes[draw.choice(places)[0]] = 1
            case 1:
                digests[draw.randrange(len(digests))] = draw.randbytes(32)
            case _:
                draw.shuffle(digests)
    else:
        _forbidden(sizes, digests, draw)
    tensors = list(patch.tensors)
    tensors[at] = TensorPatch(sizes=tuple(sizes), digests=tuple(digests))
    lie = replace(patch, tensors=tuple(tensors), signature=b"")
    if not allowed and draw.random() < 0.4:
        lie = draw.choice(_HEADS)(replace(lie, tensors=patch.tensors))
    return seal_patch(lie), not allowed


def _forbidden(sizes: list[int], digests: list[bytes], draw: random.Random) -> None:
    """Make a tensor's lists what no patch may have."""
    match draw.randrange(5):
        case 0:
            sizes[draw.randrange(len(sizes))] = draw.choice((TILE, TILE + 1, 1 << 20, (1 << 32) - 1))
        case 1:
            sizes[draw.choice([tile for tile, size in enumerate(sizes) if size])] = 0
        case 2:
            del digests[draw.randrange(len(digests)) :]
        case 3:
            digests[draw.randrange(len(digests))] = draw.randbytes(draw.choice((0, 31, 33)))
        case _:
            sizes.append(1)
            digests += [draw.randbytes(32)] * draw.randrange(2)


#: What no head of a patch to its target may say.
_HEADS: Final[tuple[Callable[[Patch], Patch], ...]] = (
    lambda patch: replace(patch, run_id="other"),
    lambda patch: replace(patch, base=replace(patch.base, policy="other")),
    lambda patch: replace(patch, base=patch.version),
    lambda patch: replace(patch, version=replace(patch.version, step=patch.version.step + 1)),
    lambda patch: replace(patch, version=replace(patch.version, root=bytes(32))),
    lambda patch: replace(patch, changed=patch.elements + 1),
    lambda patch: replace(patch, tensors=patch.tensors[1:]),
    lambda patch: replace(patch, tensors=(*patch.tensors, patch.tensors[0])),
    lambda patch: replace(patch, signature=_OTHER.sign_patch(patch).signature),
)
