"""One rank speaks for each guard, and all ranks lend or none."""

import asyncio
from pathlib import Path

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.trainer.lending.shared_loan import LendingPlace, leaders, own_place, tell_places
from tests.fakes.rank_notes import SharedNotes


def place(host: str, folder: str) -> LendingPlace:
    return LendingPlace(host, folder)


def test_the_lowest_rank_of_each_folder_leads_there() -> None:
    one, two = place("a", "boot-a:1:7"), place("b", "boot-b:1:7")
    assert leaders({0: one, 1: one, 2: two, 3: two}) == {0: one, 2: two}
    assert leaders({0: one, 1: one}) == {0: one}


def test_ranks_that_lend_nothing_have_no_leader() -> None:
    assert leaders({0: place("a", ""), 1: place("b", "")}) == {}


def test_a_trainer_of_which_only_some_ranks_lend_names_the_host_and_the_setting() -> None:
    with pytest.raises(InvalidRequest, match="generate: is set for rank 0, but not for rank 1 on b; set generate and"):
        leaders({0: place("a", "boot-a:1:7"), 1: place("b", "")})


def test_a_folder_is_one_place_by_whatever_path_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "grants").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "grants")
    assert own_place(str(tmp_path / "grants")) == own_place(str(tmp_path / "link"))
    assert own_place(str(tmp_path / "grants")) != own_place(str(tmp_path / "other"))
    assert not own_place("").folder


async def test_all_ranks_find_the_same_leaders(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    board, folders = SharedNotes(), [str(tmp_path / name) for name in "aabb"]
    found = await asyncio.gather(*(tell_places(board, rank, 4, folder) for rank, folder in enumerate(folders)))
    assert [sorted(one) for one in found] == [[0, 2]] * 4
