"""What the ablations make of what they play."""

from pathlib import Path

import pytest

from benchmarks import ablations
from benchmarks.ablations import MECHANISMS, SCENES, Ablated, Setup, ablated, row


def test_each_mechanism_is_played_in_a_scene_or_says_why_not() -> None:
    for mechanism in MECHANISMS.values():
        assert set(mechanism.moot) <= set(SCENES)
        assert all(mechanism.moot.values())
        assert mechanism.off != mechanism.on or set(mechanism.moot) == set(SCENES)


def test_ratios_are_of_the_same_seed_and_a_moot_pair_is_not_played(monkeypatch: pytest.MonkeyPatch) -> None:
    def played(setup: Setup, seed: int, _: Path) -> float:
        return (1.0 + seed) * (1.5 if setup.order == "lengths" else 1.0)

    monkeypatch.setattr(ablations, "SCENES", {"tail": played})
    order, turns = ablated(["order by lengths", "turn routing"], ["tail"], [0, 1], traces=Path(), jobs=1)
    assert order.speeds == [(1.0, 1.5), (2.0, 3.0)]
    assert order.ratio == (1.5, 1.5, 1.5)
    assert "1.500 (1.500 to 1.500), 1.5 to 2.2 steps/h" in row(order)
    assert turns == Ablated(mechanism="turn routing", scene="tail", moot="episodes have one turn")
    assert "cannot matter: episodes have one turn" in row(turns)
