"""What the relay keeps of a chain of versions: by count, age, bytes and quota, for holders, and as keyframes."""

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from ebbtide.errors import InvalidRequest, NoCapacity
from ebbtide.transfer.version_finder import PathRequest
from ebbtide.types.weights import Holder
from ebbtide.weight_relay.service import WeightRelay
from tests.fakes.clocks import SetClock
from tests.integration.weight_relay.lines import Line
from tests.support.waiting import wait_until
from tests.unit.weight_relay.relays import SMALL, held, keyframes, patches, publish, publish_all, relay_at

DENSE = 20_000 * 2 + 3_000 * 4
STREAM = "run", "policy"


async def opened(folder: Path, clock: SetClock | None = None, **settings: Any) -> WeightRelay:
    relay = relay_at(folder, clock, **settings)
    await relay.open()
    return relay


async def test_versions_beyond_the_count_go_when_a_keyframe_stands_behind_them(tmp_path: Path) -> None:
    relay = await opened(tmp_path, keep_versions=2, keyframe_every=4)
    line = Line(7, sizes=SMALL)
    for version in list(line)[:5]:
        await publish(relay, version)
    await wait_until(lambda: keyframes(relay) == [1, 5], what="the keyframe")
    assert held(relay) == [1, 2, 3, 4, 5]  # version 4 is kept, and made of the others
    await publish(relay, line[6])
    assert held(relay) == [5, 6]
    assert patches(relay) == [(5, 6)]
    await publish(relay, line[7])
    assert held(relay) == [5, 6, 7]
    await relay.close()


async def test_what_live_holders_have_keeps_its_patches_to_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = await opened(tmp_path, keep_versions=1, keyframe_every=4)
    monkeypatch.setattr(relay.holders, "needed", lambda: {(STREAM, 2)})
    line = Line(6, sizes=SMALL)
    for version in list(line)[:5]:
        await publish(relay, version)
    await wait_until(lambda: keyframes(relay) == [5], what="the keyframe alone")
    await publish(relay, line[6])
    assert held(relay) == [2, 3, 4, 5, 6]
    assert [way.via for way in await relay.reader.ways("run", "policy", 6, [2])] == [(3, 4, 5, 6)]
    assert relay.reader.manifest("run", "policy", 0).version.version == 6
    await relay.close()
    clock = SetClock()
    relay = await opened(tmp_path, clock, keep_versions=1, keyframe_every=4)
    assert held(relay) == [2, 3, 4, 5, 6]  # its holders have had no time to tell
    clock.now = 61.0
    await relay.collector.drop_dead_stages()
    assert held(relay) == [5, 6]
    await relay.close()


async def test_versions_go_by_age_and_a_keyframe_is_made_for_what_is_left(tmp_path: Path) -> None:
    clock = SetClock()
    relay = await opened(tmp_path, clock, keep_versions=9, max_age_s=100.0)
    line = Line(4, sizes=SMALL)
    for version in line:
        await publish(relay, version)
        clock.now += 50.0
    assert held(relay) == [1, 2, 3, 4]
    await relay.collector.drop_dead_stages()
    relay.keyframes.consider()
    await wait_until(lambda: held(relay) == [3, 4] and keyframes(relay) == [3], what="the end of the oldest")
    await relay.close()


async def test_a_runs_quota_names_itself_and_spares_other_runs(tmp_path: Path) -> None:
    quota = 2 * DENSE + 10_000
    relay = await opened(tmp_path, run_quota_bytes=quota, keyframe_every=99, keyframe_share=99.0)
    line = Line(2, sizes=SMALL, share=1.0)
    await publish(relay, line[1])
    await relay.intake.begin(line[2].manifest)
    with pytest.raises(NoCapacity, match=f"quota of {quota} bytes .*--run-quota-bytes"):
        await relay.intake.begin(Line(3, sizes=SMALL, seed=3)[3].manifest)
    other = Line(1, sizes=SMALL, run_id="other", seed=7)
    assert await relay.intake.begin(other[1].manifest)
    await relay.close()


async def test_room_that_ends_is_spent_on_a_keyframe_while_there_is_some(tmp_path: Path) -> None:
    sizes = {"w": ("BF16", "<u2", 400_000)}
    relay = await opened(tmp_path, budget_bytes=2_100_000, keep_versions=2, keyframe_every=99, keyframe_share=99.0)
    line = Line(12, sizes=sizes, share=0.05)
    for number, version in enumerate(line, start=1):
        await publish(relay, version)
        await wait_until(
            lambda: relay.keyframes._task is None or relay.keyframes._task.done(), what="the keyframes' rest"
        )
        assert relay.reader.manifest("run", "policy", 0).version.version == number
        assert sum(relay.library.index.on_disk.values()) <= 2_100_000
    assert min(held(relay)) > 1
    await relay.close()


async def test_dense_and_patched_publishes_may_follow_each_other(tmp_path: Path) -> None:
    relay = await opened(tmp_path)
    line = Line(4, sizes=SMALL)
    await publish(relay, line[1])
    await publish(relay, line[2])
    await publish(relay, line[3], whole=True)
    await publish(relay, line[4])
    assert keyframes(relay) == [1, 3]
    assert patches(relay) == [(1, 2), (3, 4)]
    assert [way.start for way in await relay.reader.ways("run", "policy", 4, [2])] == [3]
    await relay.close()


async def test_refusals_are_counted_by_reason(tmp_path: Path) -> None:
    from ebbtide.weight_relay.intake.publishing import refusals

    def counted() -> float:
        return REGISTRY.get_sample_value("ebbtide_relay_refusals_total", {"reason": "malformed"}) or 0.0

    before = counted()
    with pytest.raises(InvalidRequest), refusals("publish", "somebody"):
        raise InvalidRequest("no", field="tensors")
    assert counted() == before + 1


async def test_keyframes_and_patches_outlive_a_restart_that_comes_amid_the_making(tmp_path: Path) -> None:
    relay = await opened(tmp_path, keyframe_every=99)
    line = Line(4, sizes=SMALL)
    await publish_all(relay, line)
    await relay.close()
    relay = await opened(tmp_path, keyframe_every=2)  # makes a keyframe as soon as it is there
    await wait_until(lambda: keyframes(relay) == [1, 4], what="the keyframe")
    await relay.close()
    relay = await opened(tmp_path, keyframe_every=2)
    assert keyframes(relay) == [1, 4]
    assert patches(relay) == [(1, 2), (2, 3), (3, 4)]
    await relay.close()


async def test_what_a_lasting_holder_has_too_makes_room_before_what_only_spot_machines_have(tmp_path: Path) -> None:
    relay = await opened(tmp_path, budget_bytes=2_500_000)
    line, holders = Line(4, sizes={"w": ("BF16", "<u2", 400_000)}, share=1.0), relay.holders
    for number in (1, 2, 3):
        await publish(relay, line[number], whole=True)
    for name, version, lasting in (("spot", 1, False), ("reserved", 2, True)):
        holder = Holder(name=name, address=f"{name}:1", lasting=lasting)
        holders.told(PathRequest(run_id="run", policy="policy", holder=holder, version=version, done=True), version)
    await publish(relay, line[4], whole=True)
    assert held(relay) == [1, 3, 4]
    await relay.close()
