"""Which policy versions, dense tiles and patches a relay lets go."""

import itertools
import random
from collections.abc import Set

import msgspec
import pytest

from ebbtide.weight_relay.retention import HeldPatch, HeldVersion, RetentionPlan, RetentionRules, Stream, plan_retention
from ebbtide.weight_relay.version_paths import PatchStep, find_paths, legs_to, whole_versions

STREAM: Stream = ("run", "policy")


def held(version: int, *tiles: str, run: str = "run", idle_s: float = 0.0, age_s: float = 0.0) -> HeldVersion:
    """A keyframe of tiles of 10 bytes each; without any, a version that patches lead to."""
    return HeldVersion(
        stream=(run, "policy"),
        version=version,
        tiles={tile.encode(): 10 for tile in tiles},
        keyframe=bool(tiles),
        size=10,
        idle_s=idle_s,
        age_s=age_s,
    )


def patch(base: int, version: int, *, size: int = 2, composed: bool = False, idle_s: float = 0.0) -> HeldPatch:
    blobs = {f"{base}-{version}".encode(): size}
    return HeldPatch(stream=STREAM, base=base, version=version, blobs=blobs, composed=composed, idle_s=idle_s)


def chain(first: int, last: int) -> list[HeldPatch]:
    return [patch(version, version + 1) for version in range(first, last)]


def plan(
    *versions: HeldVersion,
    patches: list[HeldPatch] | None = None,
    keep: int = 9,
    budget: int = 1000,
    incoming: str = "",
    max_age_s: float = 0.0,
    quota: int = 0,
    needed: Set[int] = frozenset(),
    pinned: Set[int] = frozenset(),
) -> RetentionPlan:
    return plan_retention(
        versions,
        patches or [],
        rules=RetentionRules(
            keep_versions=keep,
            budget_bytes=budget,
            abandoned_s=100.0,
            max_age_s=max_age_s,
            run_quota_bytes=quota,
        ),
        incoming={"run": {tile.encode(): 10 for tile in incoming}},
        needed={(STREAM, version) for version in needed},
        pinned={(STREAM, version) for version in pinned},
    )


def _step(item: HeldPatch) -> PatchStep:
    return PatchStep(item.base, item.version, sum(item.blobs.values()))


def evicted(result: RetentionPlan) -> list[tuple[str, int]]:
    return [(item.stream[0], item.version) for item in result.evict]


def test_the_newest_few_of_each_stream_stay() -> None:
    versions = [held(n, f"{n}") for n in (3, 1, 4, 2)] + [held(1, "x", run="other")]
    assert evicted(plan(*versions, keep=2)) == [("run", 1), ("run", 2)]


def test_what_fits_stays() -> None:
    assert plan(held(1, "a"), held(2, "b"), budget=20) == RetentionPlan(evict=())


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
    assert sorted(evicted(result)) == [("other", 1), ("run", 1)]
    assert result.excess_bytes == 0


def test_what_kept_versions_were_made_of_stays_until_a_keyframe_stands_among_them() -> None:
    versions = [held(1, "a"), *(held(n) for n in range(2, 7))]
    assert not evicted(plan(*versions, patches=chain(1, 6), keep=2))
    versions[3] = held(4, "d")
    result = plan(*versions, patches=chain(1, 6), keep=2)
    assert evicted(result) == [("run", 1), ("run", 2), ("run", 3)]
    assert [(item.base, item.version) for item in result.patches] == [(1, 2), (2, 3), (3, 4)]


def test_a_live_holders_way_to_the_newest_stays_without_the_dense_tiles_behind_it() -> None:
    versions = [held(1, "a"), held(2), held(3), held(4, "d")]
    result = plan(*versions, patches=chain(1, 4), keep=1, needed={2})
    assert evicted(result) == [("run", 1)]
    result = plan(*versions, patches=chain(1, 4), keep=1, needed={1})
    assert not evicted(result)
    assert [item.version for item in result.thin] == [1]
    assert not result.patches


def test_a_composed_patch_goes_before_any_version() -> None:
    versions = [held(1, "a", idle_s=9), held(2), held(3)]
    patches = [*chain(1, 3), patch(1, 3, size=3, composed=True)]
    assert not plan(*versions, patches=patches, budget=17).patches
    result = plan(*versions, patches=patches, budget=16)
    assert [(item.base, item.version) for item in result.patches] == [(1, 3)]
    assert not result.evict


def test_a_composed_patch_that_alone_leads_a_live_holder_on_goes_with_that_path() -> None:
    versions = [held(1), held(2, "b", "x", idle_s=9), held(3, "c")]
    result = plan(*versions, patches=[patch(1, 3, composed=True)], keep=2, budget=12, needed={1})
    assert evicted(result) == [("run", 2)]
    assert not result.patches
    result = plan(*versions, patches=[patch(1, 3, composed=True)], keep=2, budget=11, needed={1})
    assert evicted(result) == [("run", 1), ("run", 2)]
    assert [(item.base, item.version) for item in result.patches] == [(1, 3)]
    assert not result.excess_bytes


def test_a_live_holders_way_goes_when_a_keyframe_is_as_cheap() -> None:
    """One holder of version 1 of 200: patches of 2 bytes, a keyframe of 10."""
    versions = [*(held(n) for n in range(1, 200)), held(200, "d")]
    result = plan(*versions, patches=chain(1, 200), keep=4, budget=30, incoming="e", needed={1})
    assert [item.version for item in result.evict] == list(range(1, 200))
    assert not result.excess_bytes
    result = plan(*versions, patches=chain(1, 200), keep=4, budget=30, incoming="e", needed={1, 196})
    assert [item.version for item in result.evict] == list(range(1, 196))
    assert not result.excess_bytes


def test_the_dearest_of_live_ways_makes_room_before_anything_is_refused_and_before_an_abandoned_stream_goes() -> None:
    versions = [*(held(n) for n in range(1, 5)), held(5, "d"), held(1, "o", run="other", idle_s=100)]
    patches = chain(1, 5)
    assert not plan(*versions, patches=patches, keep=1, budget=28, needed={1, 3}).evict
    result = plan(*versions, patches=patches, keep=1, budget=27, needed={1, 3})
    assert evicted(result) == [("run", 1), ("run", 2)]
    result = plan(*versions, patches=patches, keep=1, budget=20, needed={1, 3})
    assert evicted(result) == [("run", n) for n in range(1, 5)]
    assert not result.excess_bytes


def test_live_holders_keep_the_newest_of_an_abandoned_stream_even_where_their_ways_have_gone() -> None:
    versions = [held(1, idle_s=100), held(2, "b", idle_s=100)]
    result = plan(*versions, patches=chain(1, 2), keep=1, budget=5, needed={1})
    assert evicted(result) == [("run", 1)]
    assert result.excess_bytes == 5


def test_what_is_safe_elsewhere_makes_room_before_what_is_not() -> None:
    versions = [held(1, "a", idle_s=50), held(2, "b", idle_s=5), held(3, "c")]
    versions[1] = msgspec.structs.replace(versions[1], elsewhere=True)
    assert evicted(plan(*versions, budget=30, incoming="d")) == [("run", 2)]
    assert evicted(plan(*versions, budget=20, incoming="d")) == [("run", 1), ("run", 2)]


def test_passages_of_live_holders_are_no_reason_for_a_keyframe() -> None:
    versions = [held(1, age_s=400), held(2, age_s=350), held(3, "c", age_s=10), held(4)]
    result = plan(*versions, patches=chain(1, 4), keep=1, max_age_s=200.0, needed={1})
    assert not result.evict
    assert not result.keyframes


def test_versions_that_are_too_old_go_but_for_the_newest() -> None:
    versions = [held(1, "a", age_s=300), held(2, "b", age_s=250), held(3, "c", age_s=200)]
    assert evicted(plan(*versions, max_age_s=220.0)) == [("run", 1), ("run", 2)]
    assert evicted(plan(*versions, max_age_s=100.0)) == [("run", 1), ("run", 2)]


def test_a_keyframe_is_asked_for_where_old_ancestors_only_carry_younger_versions() -> None:
    versions = [held(1, "a", age_s=400), held(2, age_s=300), held(3, age_s=10), held(4)]
    assert plan(*versions, patches=chain(1, 4), max_age_s=200.0).keyframes == ((STREAM, 3),)
    assert not plan(*versions, patches=chain(1, 4), max_age_s=350.0).keyframes


def test_a_keyframe_is_asked_for_where_bytes_are_short_and_ancestors_hold_them() -> None:
    versions = [held(1, "a"), *(held(n) for n in range(2, 9))]
    assert plan(*versions, patches=chain(1, 8), keep=3, budget=23).keyframes == ((STREAM, 8),)
    assert not plan(*versions, patches=chain(1, 8), keep=3, budget=24).keyframes


def test_a_runs_quota_costs_that_run_alone() -> None:
    versions = [held(1, "a"), held(2, "b"), held(1, "c", run="other", idle_s=9), held(2, "d", run="other")]
    assert evicted(plan(*versions, quota=20)) == []
    result = plan(*versions, quota=20, incoming="e")
    assert evicted(result) == [("run", 1)]
    assert not result.over_quota
    assert plan(*versions, quota=20, incoming="ef").over_quota == {"run": 10}


def test_what_a_publish_under_way_is_based_on_stays() -> None:
    versions = [held(1, "a", idle_s=50), held(2, "b")]
    assert evicted(plan(*versions, budget=20, incoming="c", pinned={1})) == []
    assert plan(*versions, budget=20, incoming="c", pinned={1}).excess_bytes == 10


@pytest.mark.parametrize("seed", range(150))
def test_whatever_goes_all_that_stays_can_be_reached(seed: int) -> None:
    """Random graphs, holders and bounds."""
    chance = random.Random(seed)
    count = chance.randint(1, 14)
    versions = [
        held(n, *([f"t{n}", "shared"] if n == 1 or chance.random() < 0.25 else []), idle_s=chance.random() * 50)
        for n in range(1, count + 1)
    ]
    ends = {(n - 1, n) for n in range(2, count + 1)}
    ends |= {(chance.randint(1, count), chance.randint(1, count)) for _ in range(chance.randint(0, 8))}
    patches = [
        patch(a, b, size=chance.randint(1, 12), composed=b - a != 1, idle_s=chance.random()) for a, b in ends if a != b
    ]
    needed = {n for n in range(1, count + 1) if chance.random() < 0.2}
    keep, budget = chance.randint(1, 6), chance.choice([*range(5, 90), *[10_000] * 20])
    result = plan(*versions, patches=patches, keep=keep, budget=budget, needed=needed)

    gone = {item.version for item in result.evict}
    dense = {item.version for item in versions if item.keyframe} - gone - {item.version for item in result.thin}
    dropped = {(item.base, item.version) for item in result.patches}
    steps = [_step(p) for p in patches if (p.base, p.version) not in dropped]
    assert not [step for step in steps if {step.base, step.version} & gone]
    whole = whole_versions(dense, steps)
    assert count in whole
    before, after = legs_to(count, [_step(p) for p in patches]), legs_to(count, steps)
    bound = min(before[item.version].size + item.size for item in versions if item.keyframe and item.version in before)
    worth = {version for version in needed if version in before and before[version].size < bound}
    left = {t: 10 for item in versions if item.version in dense for t in item.tiles}
    left |= {d: s for p in patches if (p.base, p.version) not in dropped for d, s in p.blobs.items()}
    assert sum(left.values()) - budget <= result.excess_bytes
    every = {t: 10 for item in versions for t in item.tiles} | {d: s for p in patches for d, s in p.blobs.items()}
    if sum(every.values()) <= budget:
        assert set(range(max(1, count - keep + 1), count + 1)) <= whole
        assert all(version in after and after[version].size == before[version].size for version in worth)
    if result.excess_bytes:  # all that may go has gone
        (way,) = find_paths(dict.fromkeys(dense, 10), steps, count, ())
        assert dense == {way.start}
        assert {(step.base, step.version) for step in steps} == set(itertools.pairwise((way.start, *way.via)))
