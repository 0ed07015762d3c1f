"""Bringing a mirror to versions of a chain without anybody between."""

from collections.abc import Sequence

from ebbtide.transfer import ElementChanges, Mirror
from ebbtide.types.weights import Patch
from ebbtide.weights import Place, Planner, TileTask, Way, places
from tests.unit.weights.chain import Link, whole


def blobs_of(links: Sequence[Link]) -> dict[bytes, bytes]:
    return {digest: blob for link in links for digest, blob in link.blobs.items()}


def patches_of(links: Sequence[Link]) -> tuple[Patch, ...]:
    return tuple(link.patch for link in links if link.patch)


def tasks_to(
    mirror: Mirror, links: Sequence[Link], number: int, wanted: Sequence[Place] | None = None, *, start: int = 1
) -> list[TileTask]:
    """The tasks to version `number`: by patches where a tile is that of an earlier version, from the keyframe `start`
    where it is not."""
    target = links[number - 1].manifest
    ways = [
        Way(links[base - 1].manifest, patches_of(links[base:number]), keyframe=base == start)
        for base in range(1, number + 1)
    ]
    found = Planner(target, ways).tasks(places(target) if wanted is None else wanted, mirror.held())
    return [task for task in found if isinstance(task, TileTask)]


def bring(mirror: Mirror, links: Sequence[Link], number: int, changes: ElementChanges | None = None) -> None:
    blobs = blobs_of(links)
    for task in tasks_to(mirror, links, number):
        mirror.apply(task, blobs, changes)


def content(mirror: Mirror) -> dict[str, bytes]:
    return {tensor.name: bytes(tensor.data) for tensor in mirror.tensors()}


def assert_right(mirror: Mirror, link: Link) -> None:
    assert mirror.holds(link.manifest)
    assert content(mirror) == whole(link)
