"""A rank whose count stands still is silent; a listener that stood still itself blames nobody."""

from ebbtide.trainer.ranks.rank_world import RankSilences


def test_a_count_that_stands_still_is_silence_and_one_that_goes_on_is_none() -> None:
    silences = RankSilences(10.0)
    for second in range(11):
        assert not silences.hear({1: b"7", 2: str(second).encode()}, 100.0 + second)
    assert silences.hear({1: b"7", 2: b"11"}, 111.0) == {1: 11.0}


def test_a_count_that_goes_on_again_is_forgiven() -> None:
    silences = RankSilences(4.0)
    for second in range(4):
        assert not silences.hear({1: b"7"}, float(second))
    for second in range(4, 9):
        assert not silences.hear({1: b"8"}, float(second))
    assert silences.hear({1: b"8"}, 9.0) == {1: 5.0}


def test_who_was_frozen_itself_holds_its_own_time_against_nobody() -> None:
    silences = RankSilences(10.0)
    silences.hear({1: b"7"}, 0.0)
    assert not silences.hear({1: b"7"}, 60.0)
    assert not silences.hear({1: b"7"}, 64.0)
    assert not silences.hear({1: b"7"}, 68.0)
    assert silences.hear({1: b"7"}, 72.0) == {1: 12.0}
