"""From any mixture of versions to the wanted one, by what is cheapest for each tile."""

from collections.abc import Sequence

import numpy as np
import pytest

from ebbtide.types.weights import Patch
from ebbtide.weights import Place, Planner, TileTask, Way, places, tile_digest
from ebbtide.weights.patch import TileCodec
from ebbtide.weights.tensors import unit_width
from tests.unit.weights.chain import TILE, Link, chain


@pytest.fixture(scope="module")
def links() -> list[Link]:
    return chain(6, seed=3)


def patches(links: Sequence[Link]) -> tuple[Patch, ...]:
    return tuple(link.patch for link in links if link.patch)


def tiles(link: Link) -> dict[Place, bytes]:
    return {place: link.blobs[link.manifest.tensors[place[0]].digests[place[1]]] for place in places(link.manifest)}


def made(task: TileTask, now: bytes, dtype: str, blobs: dict[bytes, bytes]) -> bytes:
    width = unit_width(dtype)
    units = np.frombuffer(blobs[task.dense] if task.dense else now, f"<u{width}").copy()
    for digest in task.patches:
        TileCodec(width, TILE, compiled=False).apply(blobs[digest], units)
    return units.tobytes()


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_becomes_the_wanted_version(links: list[Link], seed: int) -> None:
    rng = np.random.default_rng(seed)
    wanted = links[-1]
    start, keyframe = rng.integers(len(links), size=2)
    ways = [
        Way(links[start].manifest, patches(links[start + 1 :]), keyframe=False),
        Way(links[keyframe].manifest, patches(links[keyframe + 1 :]), keyframe=True),
    ]
    mixture = {
        place: tiles(links[rng.integers(len(links))])[place] if rng.random() < 0.8 else b"?"
        for place in places(wanted.manifest)
    }
    held = {place: tile_digest(data) for place, data in mixture.items()}
    blobs = {digest: blob for link in links for digest, blob in link.blobs.items()}
    for task in Planner(wanted.manifest, ways).tasks(places(wanted.manifest), held):
        assert isinstance(task, TileTask)
        assert task.cost == sum(len(blobs[digest]) for digest in task.blobs)
        dtype = wanted.manifest.tensors[task.place[0]].dtype
        mixture[task.place] = made(task, mixture[task.place], dtype, blobs)
    assert mixture == tiles(wanted)


def test_what_is_right_already_costs_nothing(links: list[Link]) -> None:
    wanted = links[2]
    held = {place: tile_digest(data) for place, data in tiles(wanted).items()}
    way = Way(wanted.manifest, (), keyframe=True)
    assert list(Planner(wanted.manifest, [way]).tasks(places(wanted.manifest), held)) == []


def test_a_dense_tile_hides_what_came_before_it(links: list[Link]) -> None:
    way = Way(links[0].manifest, patches(links[1:]), keyframe=True)
    tasks = list(Planner(links[-1].manifest, [way]).tasks(places(links[-1].manifest), {}))
    assert all(isinstance(task, TileTask) and task.dense for task in tasks)
    final = {digest for entry in links[-1].manifest.tensors for digest in entry.digests}
    hidden = [task for task in tasks if isinstance(task, TileTask) and task.dense in final]
    assert hidden
    assert all(task.patches == () and task.cost == task.length for task in hidden)


def test_the_cheaper_of_two_paths_is_taken(links: list[Link]) -> None:
    held = {place: tile_digest(data) for place, data in tiles(links[4]).items()}
    long = Way(links[4].manifest, patches(links[5:]), keyframe=False)
    keyframe = Way(links[5].manifest, (), keyframe=True)
    for task in Planner(links[5].manifest, [keyframe, long]).tasks(places(links[5].manifest), held):
        assert isinstance(task, TileTask)
        assert task.cost <= task.length


def test_a_place_that_no_way_leads_to_is_named(links: list[Link]) -> None:
    way = Way(links[0].manifest, patches(links[1:]), keyframe=False)
    everything = list(places(links[-1].manifest))
    assert list(Planner(links[-1].manifest, [way]).tasks(everything, {})) == everything
