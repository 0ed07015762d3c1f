"""While the event loop is late, work gives way in its order, and patiences grow by its lateness; not for ever."""

import pytest

from ebbtide.coordinator.rules.overload import TICK_S, WINDOW_S, HeartbeatDelay, Overload, Work


class Loop:
    """An event loop that is late by as much as it is told."""

    def __init__(self) -> None:
        self.overload, self.now = Overload(), 100.0
        self.overload.ticked(self.now)

    def run(self, seconds: float, late_s: float = 0.0) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_S + late_s
            self.overload.ticked(self.now)


def test_a_loop_on_time_sheds_nothing_and_lengthens_no_patience() -> None:
    loop = Loop()
    loop.run(20.0, late_s=0.02)
    assert loop.overload.late_s(loop.now) == 0.0
    assert loop.overload.shed == []


@pytest.mark.parametrize(
    ("late_s", "shed"),
    [
        (0.06, [Work.STARTS]),
        (0.12, [Work.STARTS, Work.MOVES]),
        (0.2, [Work.STARTS, Work.MOVES, Work.FORECASTS]),
        (0.3, [Work.STARTS, Work.MOVES, Work.FORECASTS, Work.VIEWS]),
        (0.6, list(Work)),
    ],
)
def test_the_later_the_loop_is_the_more_work_gives_way(late_s: float, shed: list[Work]) -> None:
    loop = Loop()
    loop.run(1.0, late_s=late_s)
    assert loop.overload.shed == shed


def test_work_is_taken_up_again_one_after_another_once_the_loop_is_on_time() -> None:
    loop = Loop()
    loop.run(1.0, late_s=0.6)
    began, seen = loop.now, [loop.overload.level]
    while loop.overload.level and loop.now < began + 60.0:
        loop.run(TICK_S)
        if loop.overload.level != seen[-1]:
            seen.append(loop.overload.level)
    assert seen == [5, 4, 3, 2, 1, 0]
    assert loop.now - began >= 10.0 - TICK_S


def test_a_time_for_which_the_process_stood_still_is_not_others_silence() -> None:
    loop = Loop()
    assert loop.overload.late_s(loop.now + 60.0) == pytest.approx(60.0 - TICK_S)  # also before the next tick
    loop.now += 60.0
    loop.overload.ticked(loop.now)
    assert loop.overload.late_s(loop.now) == pytest.approx(60.0 - TICK_S)
    loop.run(WINDOW_S + 1.0)
    assert loop.overload.late_s(loop.now) == 0.0


def test_work_gives_way_while_heartbeats_are_taken_in_late_though_the_loop_is_on_time() -> None:
    loop = Loop()
    for _ in range(100):
        loop.overload.delayed(0.6)
    loop.overload.delayed(60.0)  # one worker says nothing of all
    loop.run(1.0)
    assert loop.overload.shed == [Work.STARTS, Work.MOVES]
    assert loop.overload.behind_s == loop.overload.late_s(loop.now) == 0.6
    loop.run(1.0)
    assert loop.overload.behind_s == loop.overload.late_s(loop.now) == 0.0


def test_a_heartbeats_delay_is_beyond_the_soonest_by_the_workers_clock_and_forgets_drift() -> None:
    delay = HeartbeatDelay()
    assert delay.of(0.0, 1_000.0) is None
    assert delay.of(1.0, 1_001.2) == 0.0
    assert delay.of(2.0, 1_002.0) == 0.0  # sooner than the first
    assert delay.of(3.0, 1_005.0) == pytest.approx(2.0, abs=0.01)
    assert delay.of(1.0, 1_006.0) is None  # it started again
    assert delay.of(2.0, 1_007.0) == 0.0
    for second in range(3, 7_200):  # its clock is slow by 100 ppm
        assert (delay.of(second * (1 - 1e-4), 1_005.0 + second) or 0.0) < 0.01


@pytest.mark.parametrize("late_s", [0.1, 0.5, 1.0])
def test_however_long_the_loop_is_late_patience_grows_by_some_seconds_at_most(late_s: float) -> None:
    loop = Loop()
    loop.run(300.0, late_s=late_s)
    assert 3.0 < loop.overload.late_s(loop.now) <= WINDOW_S
