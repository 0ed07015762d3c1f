"""Laws of what share of the fleet each run is due."""

import random
from collections.abc import Sequence

import msgspec
import pytest

from ebbtide.coordinator.rules.fair_share import Demand, check_floor, entitled
from ebbtide.errors import NotReady
from ebbtide.types.run import ShareSpec


def demand(run_id: str, **more: float) -> Demand:
    return Demand(run_id=run_id, **more)  # type: ignore[arg-type]


def test_shares_are_in_proportion_to_the_weights() -> None:
    assert entitled([demand("a"), demand("b"), demand("c", weight=2.0)], 3) == {"a": 0.25, "b": 0.25, "c": 0.5}


def test_what_a_run_cannot_use_goes_to_the_others_by_their_weights() -> None:
    shares = entitled([demand("a", weight=10.0, wants=1.0), demand("b"), demand("c", weight=2.0)], 10)
    assert shares == pytest.approx({"a": 0.1, "b": 0.3, "c": 0.6})


def test_what_nobody_can_use_is_given_all_the_same() -> None:
    shares = entitled([demand("a", wants=1.0), demand("b", wants=1.0)], 10)
    assert shares == pytest.approx({"a": 0.5, "b": 0.5})


def test_a_ceiling_holds_though_nobody_else_wants_the_rest() -> None:
    assert entitled([demand("a", ceiling=0.3)], 10) == {"a": 0.3}
    shares = entitled([demand("a", ceiling=0.3, weight=9.0), demand("b", ceiling=0.4)], 10)
    assert shares == pytest.approx({"a": 0.3, "b": 0.4})


def test_a_floor_holds_against_any_weight_and_priority() -> None:
    others = [demand(f"o{number}", weight=1000.0, priority=10) for number in range(9)]
    shares = entitled([demand("a", floor=0.2, weight=0.001, priority=-10), *others], 10)
    assert shares["a"] == pytest.approx(0.2)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_a_floor_is_part_of_the_share_and_not_added_to_it() -> None:
    assert entitled([demand("a", floor=0.2), demand("b")], 10) == pytest.approx({"a": 0.5, "b": 0.5})


def test_a_floor_that_is_not_used_is_not_kept_free() -> None:
    assert entitled([demand("a", floor=0.8, wants=1.0), demand("b")], 10) == pytest.approx({"a": 0.1, "b": 0.9})


def test_a_higher_priority_takes_all_that_it_can_use_and_a_lower_one_the_rest() -> None:
    assert entitled([demand("a"), demand("b", priority=1)], 4) == {"b": 1.0, "a": 0.0}
    shares = entitled([demand("a"), demand("b", priority=1, wants=1.0), demand("c", weight=3.0)], 4)
    assert shares == pytest.approx({"b": 0.25, "a": 0.1875, "c": 0.5625})


def random_demands(draw: random.Random) -> list[Demand]:
    count = draw.randint(1, 12)
    floors = [draw.uniform(0.0, 1.0 / count) if draw.random() < 0.4 else 0.0 for _ in range(count)]
    return [
        Demand(
            run_id=f"r{number}",
            weight=draw.choice((0.01, 0.5, 1.0, 2.0, 100.0)),
            floor=floor,
            ceiling=draw.uniform(floor, 1.0) or None if draw.random() < 0.4 else None,
            priority=draw.choice((0, 0, 1, -1)),
            wants=draw.choice((float("inf"), 1.0, 2.0, 7.0)),
        )
        for number, floor in enumerate(floors)
    ]


@pytest.mark.parametrize("seed", range(300))
def test_no_share_breaks_a_bound_and_nothing_usable_is_left(seed: int) -> None:
    draw = random.Random(seed)
    demands, workers = random_demands(draw), draw.randint(1, 40)
    shares = entitled(demands, workers)
    top = {one.run_id: 1.0 if one.ceiling is None else one.ceiling for one in demands}
    assert shares.keys() == top.keys()
    assert sum(shares.values()) <= 1.0 + 1e-6
    for one in demands:
        assert shares[one.run_id] <= top[one.run_id] + 1e-6
        assert shares[one.run_id] >= min(one.floor, one.wants / workers, top[one.run_id]) - 1e-6
    assert sum(shares.values()) >= min(1.0, sum(top.values())) - 1e-6  # work conserving, but for ceilings
    _check_classes(demands, shares, workers)


def _check_classes(demands: Sequence[Demand], shares: dict[str, float], workers: int) -> None:
    """Where a run has less than it could use, no lower class has more than floors, or what is left over."""
    for one in demands:
        usable = min(one.wants / workers, 1.0 if one.ceiling is None else one.ceiling)
        if shares[one.run_id] < usable - 1e-6:
            for other in demands:
                if other.priority < one.priority:
                    assert shares[other.run_id] <= other.floor + 1e-6


def test_floors_can_be_promised_up_to_the_whole_fleet_and_no_further() -> None:
    live = {"a": 0.5, "b": 0.3, "c": 0.0}
    check_floor("d", 0.2, live)
    check_floor("a", 0.7, live)  # its own does not count against it
    with pytest.raises(NotReady, match=r"share\.floor: 0\.25 .* 0\.8 in all: a \(0\.5\), b \(0\.3\); .* at most 0\.2"):
        check_floor("d", 0.25, live)


def test_an_empty_fleet_has_no_shares() -> None:
    assert entitled([demand("a")], 0) == {}
    assert entitled([], 3) == {}


@pytest.mark.parametrize("seed", range(40))
def test_the_lightest_and_the_heaviest_weights_share_no_more_than_the_fleet(seed: int) -> None:
    """Floats lose what is small beside what is large, so weights have bounds."""
    draw = random.Random(seed)
    weights = [1e-6, 1e6, *(10 ** draw.uniform(-6, 6) for _ in range(draw.randrange(1, 9)))]
    runs = [Demand(run_id=str(n), weight=one, ceiling=draw.choice([None, 0.3])) for n, one in enumerate(weights)]
    for some in (runs, [runs[0], msgspec.structs.replace(runs[0], run_id="like it", ceiling=None)]):
        most = min(1.0, sum(one.ceiling or 1.0 for one in some))
        assert sum(entitled(some, 3).values()) == pytest.approx(most, abs=1e-4)
    for beyond in (1e-9, 1e9, 0.0, float("nan")):
        with pytest.raises(msgspec.ValidationError, match="weight"):
            msgspec.convert({"weight": beyond}, ShareSpec)
