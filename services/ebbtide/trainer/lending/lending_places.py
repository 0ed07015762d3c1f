"""Finds out which of a trainer's ranks speak for a guard: one for each folder of grants.

Ranks on one host share its guard. Each rank tells all others the folder that it was given, and the lowest rank of
each folder leads there. All ranks lend, or none: a step that waits for one rank's device waits for all.
"""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.trainer.ranks.rank_board import RankBoard

#: All ranks have joined before: they tell their places within this time.
_TELL_S: Final = 60.0
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class LendingPlace(Struct, frozen=True):
    """A rank's folder of grants."""

    host: str  # for people
    folder: str  # the same for ranks that share the folder, whatever each calls it; empty: this rank lends nothing


def own_place(folder: str) -> LendingPlace:
    """The place of a rank that was given the existing `folder`; empty: none."""
    if not folder:
        return LendingPlace(socket.gethostname(), "")
    state = Path(folder).stat()
    return LendingPlace(socket.gethostname(), f"{_BOOT.read_text().strip()}:{state.st_dev}:{state.st_ino}")


def leaders(places: Mapping[int, LendingPlace]) -> dict[int, LendingPlace]:
    """The ranks that speak for a guard, each with its place; empty if no rank lends. Raises `InvalidRequest` if only
    some do."""
    lending = {rank for rank, place in places.items() if place.folder}
    if not lending:
        return {}
    if apart := sorted(places.keys() - lending):
        text = (
            f"is set for rank {min(lending)}, but not for rank {apart[0]} on {places[apart[0]].host}; set generate and "
        )
        raise InvalidRequest(
            text + "grant_dir for the ranks of every host, and run a serving-guard on each", field="generate"
        )
    found: dict[str, int] = {}
    for rank in sorted(places):
        found.setdefault(places[rank].folder, rank)
    return {rank: places[rank] for rank in found.values()}


async def tell_places(board: RankBoard, rank: int, size: int, folder: str) -> dict[int, LendingPlace]:
    """Tells this rank's place and returns the `leaders` of all. All ranks call this. Raises `InvalidRequest` as
    `leaders` does, and `Unavailable` if a rank does not tell its place."""
    await board.put(_name(rank), msgspec.msgpack.encode(own_place(folder)))
    places: dict[int, LendingPlace] = {}
    for other in range(size):
        note = await board.await_one(_name(other), _TELL_S)
        if note is None:
            raise InvalidRequest(
                f"rank {other} of {size} does not say what it lends; start all ranks anew", field="ranks"
            )
        places[other] = msgspec.msgpack.decode(note, type=LendingPlace)
    return leaders(places)


def _name(rank: int) -> str:
    return f"ebbtide/loans/place/{rank}"
