"""Which versions a relay lets go."""

from ebbtide.scheduling.retention import HeldVersion, RetentionPlan, plan_retention


def held(version: int, *tiles: str, run: str = "run", idle_s: float = 0.0, size: int = 10) -> HeldVersion:
    return HeldVersion(
        stream=(run, "policy"), version=version, tiles={tile.encode(): size for tile in tiles}, idle_s=idle_s
    )


def plan(*versions: HeldVersion, keep: int = 9, budget: int = 1000, incoming: str = "") -> RetentionPlan:
    return plan_retention(
        versions,
        keep_versions=keep,
        budget_bytes=budget,
        abandoned_s=100.0,
        incoming={tile.encode(): 10 for tile in incoming},
    )


def evicted(result: RetentionPlan) -> list[tuple[str, int]]:
    return [(item.stream[0], item.version) for item in result.evict]


def test_the_newest_few_of_each_stream_stay() -> None:
    versions = [held(n, f"{n}") for n in (3, 1, 4, 2)] + [held(1, "x", run="other")]
    assert evicted(plan(*versions, keep=2)) == [("run", 1), ("run", 2)]


def test_what_fits_stays() -> None:
    assert plan(held(1, "a"), held(2, "b"), budget=20) == RetentionPlan(evict=(), excess_bytes=0)


def test_the_longest_idle_of_the_older_versions_makes_room() -> None:
    versions = [held(1, "a", idle_s=5), held(2, "b", idle_s=50), held(3, "c")]
    assert evicted(plan(*versions, budget=30, incoming="d")) == [("run", 2)]


def test_shared_tiles_count_once_and_free_nothing_until_their_last_user_goes() -> None:
    versions = [held(1, "a", "b", idle_s=9), held(2, "a", "b", idle_s=5), held(3, "c")]
    assert evicted(plan(*versions, budget=30)) == []
    assert evicted(plan(*versions, budget=30, incoming="d")) == [("run", 1), ("run", 2)]
    assert evicted(plan(*versions, budget=30, incoming="c")) == []


def test_the_newest_of_a_live_stream_never_goes() -> None:
    result = plan(held(1, "a"), held(2, "b"), held(1, "c", run="other", idle_s=99), budget=20, incoming="d")
    assert evicted(result) == [("run", 1)]
    assert result.excess_bytes == 10


def test_the_newest_of_an_abandoned_stream_goes_last() -> None:
    result = plan(held(1, "a"), held(2, "b"), held(1, "c", run="other", idle_s=100), budget=20, incoming="d")
    assert evicted(result) == [("run", 1), ("other", 1)]
    assert result.excess_bytes == 0
