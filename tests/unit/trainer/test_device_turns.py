"""A run's events tell who has its trainer's devices when."""

import asyncio

from ebbtide.trainer.lending.device_loan import OwnDevice, ReportedDevice
from ebbtide.types.device_turns import HELD, LENT, RETURNING, DeviceTurn, device_event, device_turns
from ebbtide.types.run import RunEvent
from tests.support.waiting import wait_until


def at(age_s: float, event: RunEvent) -> RunEvent:
    return RunEvent(kind=event.kind, values=event.values, labels=event.labels, age_s=age_s)


def test_turns_follow_each_other_without_gaps_and_the_last_one_goes_on() -> None:
    events = [
        at(9.0, device_event(HELD, key="b", ago_s=1.0, return_s=2.0)),
        RunEvent(kind="step", age_s=4.0),
        at(3.0, device_event(LENT, key="a", ago_s=0.5)),
        at(1.0, device_event(HELD, key="c", ago_s=0.0)),
    ]
    assert device_turns(events, 20.0) == [
        DeviceTurn(HELD, 1.0, 2.5),
        DeviceTurn(LENT, 2.5, 6.0),
        DeviceTurn(RETURNING, 6.0, 8.0),
        DeviceTurn(HELD, 8.0, 20.0),
    ]


def test_a_trainer_that_lends_nothing_has_no_turns() -> None:
    assert device_turns([RunEvent(kind="step", age_s=4.0)], 20.0) == []


def test_turns_of_one_state_are_one_turn_as_after_a_trainer_that_was_killed() -> None:
    events = [at(age, device_event(HELD, key=str(age), ago_s=0.0)) for age in (1.0, 5.0)]
    assert device_turns(events, 9.0) == [DeviceTurn(HELD, 1.0, 9.0)]


class SlowDevice(OwnDevice):
    """Comes back three seconds after it is taken back, on the test's own clock."""

    def __init__(self) -> None:
        self.now = 100.0

    async def take_back(self, spell_s: float = 0.0, *, hand_over: bool = False) -> None:
        self.now += 3.0


async def test_changes_are_reported_in_order_with_the_time_since_then_and_repeats_are_not() -> None:
    device, reports = SlowDevice(), list[RunEvent]()
    away = asyncio.Event()

    async def report(events: object) -> None:
        await away.wait()
        assert isinstance(events, list)
        reports.extend(events)

    reported = ReportedDevice(device, report, lineage="x", clock=lambda: device.now)
    running = asyncio.create_task(reported.run())
    try:
        await reported.take_back()
        reported.lend()
        reported.lend()
        device.now += 10.0
        away.set()
        await wait_until(lambda: len(reports) == 2)
    finally:
        running.cancel()
    assert [(one.kind, one.key, one.labels["state"]) for one in reports] == [
        ("device", "x.1", HELD),
        ("device", "x.2", LENT),
    ]
    assert [one.values for one in reports] == [{"ago_s": 10.0, "return_s": 3.0}, {"ago_s": 10.0, "return_s": 0.0}]
