"""A process knows its rank from the environment that torchrun makes, and what contradicts it is named."""

import pytest

from ebbtide.errors import InvalidRequest
from ebbtide.trainer.ranks.rank_launcher import RankPlace, place_of

WORLD = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_without_torchrun_there_is_no_place() -> None:
    assert place_of({}, 1) is None
    assert place_of({"RANK": "0"}, 2) is None


def test_a_world_of_one_is_none() -> None:
    assert place_of(WORLD | {"RANK": "0", "WORLD_SIZE": "1"}, 1) is None


@pytest.mark.parametrize("asked", [1, 4])
def test_the_environment_gives_the_place(asked: int) -> None:
    assert place_of(WORLD, asked) == RankPlace(rank=3, size=4, local_rank=1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({"RANK": "4"}, "RANK"),
        ({"RANK": "-1"}, "RANK"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
    ],
)
def test_an_environment_that_makes_no_sense_is_named(changes: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        place_of(WORLD | changes, 1)
    assert caught.value.field == field


def test_a_setting_that_contradicts_torchrun_is_named() -> None:
    with pytest.raises(InvalidRequest, match="WORLD_SIZE is 4") as caught:
        place_of(WORLD, 2)
    assert caught.value.field == "ranks"
