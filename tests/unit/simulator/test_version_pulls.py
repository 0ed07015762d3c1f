"""Downloads share the relay and each other, end at any moment of a long scenario, and stop when nobody waits."""

import pytest

from ebbtide.simulator.world.fleet.version_pulls import VersionPulls, WeightTerms
from ebbtide.simulator.world.virtual_time import VirtualTime

GB = 1_000_000_000
LINK = 6.25e9  # 50 Gbit/s


@pytest.fixture
def time() -> VirtualTime:
    return VirtualTime()


def pulls(time: VirtualTime, relay: float = 25e9) -> VersionPulls:
    found = VersionPulls(time, relay)
    found.add_run("math", WeightTerms(dense_bytes=16 * GB, patch_bytes=GB))
    found.publish("math", 1)
    return found


def play(time: VirtualTime) -> None:
    for _ in range(10_000):
        if time.next == float("inf"):
            return
        time.step()
    raise AssertionError("time stands still")


@pytest.mark.parametrize("at_s", [0.0, 1_000.0, 3_000.0, 10_000.0, 86_000.0, 3e6])
def test_downloads_end_at_any_moment_of_a_scenario(time: VirtualTime, at_s: float) -> None:
    found, ends = pulls(time), list[float]()

    def begin() -> None:
        found.begin("math", 1, 0, LINK, lambda: ends.append(time.now))

    for number in range(50):
        time.at(at_s + number * 0.37, begin)
    play(time)
    assert len(ends) == 50


def test_a_worker_alone_pulls_at_the_speed_of_its_link(time: VirtualTime) -> None:
    ends = list[float]()
    pulls(time).begin("math", 1, 0, LINK, lambda: ends.append(time.now))
    play(time)
    assert ends == [pytest.approx(16 * GB / LINK)]


def test_a_worker_with_the_version_before_pulls_the_patch(time: VirtualTime) -> None:
    found, ends = pulls(time), list[float]()
    found.publish("math", 2)
    found.begin("math", 2, 1, LINK, lambda: ends.append(time.now))
    play(time)
    assert ends == [pytest.approx(GB / LINK)]
    assert found.bytes == GB


@pytest.mark.parametrize("stops", [False, True])
def test_a_pull_that_is_stopped_leaves_the_relay_to_the_others(time: VirtualTime, stops: bool) -> None:
    found, ends = pulls(time, relay=LINK / 10), list[float]()
    others = [found.begin("math", 1, 0, LINK / 100, lambda: None) for _ in range(50)]
    found.begin("math", 1, 0, LINK, lambda: ends.append(time.now))
    for stop in others if stops else ():
        stop()
    play(time)
    alone_s = 16 * GB / (LINK / 10 + LINK / 2)
    assert (ends[0] == pytest.approx(alone_s)) is stops
