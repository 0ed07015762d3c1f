"""A stale mirror is read by one task at a time, and each caller gets what was stored before its call."""

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.coordinator.run_recovery import RunRecovery
from ebbtide.coordinator.state.notifier import DispatchWakeups
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.errors import StoreUnavailable
from ebbtide.types.run import EnvironmentSpec, RunSpec


class Recovery(RunRecovery):
    """Notes what it reads instead of reading it. `last`: called at the end of the first reading."""

    def __init__(self) -> None:
        anything: Any = SimpleNamespace(expire_unconfirmed=lambda run: None)
        super().__init__(anything, anything, anything, anything, grace_s=1.0)
        self.read = list[RunState]()
        self.go_on = asyncio.Event()
        self.last: Any = None

    async def _reread(self, run: RunState) -> None:
        self.read.append(run)
        run.mirror.stale = False
        await self.go_on.wait()
        if self.last is not None:
            last, self.last = self.last, None
            last()


def stale_run() -> RunState:
    return RunState(
        "r", RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e")), DispatchWakeups(), lambda: 0.0
    )


async def test_callers_share_a_reading() -> None:
    recovery, run = Recovery(), stale_run()
    calls = [asyncio.create_task(recovery.refresh(run)) for _ in range(3)]
    await asyncio.sleep(0)
    recovery.go_on.set()
    await asyncio.gather(*calls)
    assert recovery.read == [run]


async def test_a_mirror_that_is_stale_again_as_its_reading_ends_is_read_again() -> None:
    recovery, run = Recovery(), stale_run()
    late = list[asyncio.Task[None]]()

    def stale_again() -> None:
        run.mirror.stale = True
        late.append(asyncio.create_task(recovery.refresh(run)))  # it runs after the task, and before its callbacks

    recovery.last = stale_again
    recovery.go_on.set()
    await recovery.refresh(run)
    await asyncio.gather(*late)
    assert recovery.read == [run, run]
    assert not run.mirror.stale


async def test_a_caller_as_a_failed_reading_ends_does_not_get_its_error() -> None:
    recovery, run = Recovery(), stale_run()
    late = list[asyncio.Task[None]]()

    def fail() -> None:
        run.mirror.stale = True
        late.append(asyncio.create_task(recovery.refresh(run)))
        raise StoreUnavailable("away")

    recovery.last = fail
    recovery.go_on.set()
    with pytest.raises(StoreUnavailable, match="away"):
        await recovery.refresh(run)
    await asyncio.gather(*late)
    assert recovery.read == [run, run]


async def test_a_run_that_was_added_again_does_not_wait_for_its_former_mirror() -> None:
    recovery, former, run = Recovery(), stale_run(), stale_run()
    calls = [asyncio.create_task(recovery.refresh(one)) for one in (former, run)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert recovery.read == [former, run]
    recovery.go_on.set()
    await asyncio.gather(*calls)


async def test_a_failed_reading_is_freed_without_a_collection() -> None:
    recovery, run = Recovery(), stale_run()
    seen = list["weakref.ref[asyncio.Task[Any] | None]"]()

    def fail() -> None:
        seen.append(weakref.ref(asyncio.current_task()))
        raise StoreUnavailable("away")

    recovery.last = fail
    recovery.go_on.set()
    gc.disable()
    try:
        with pytest.raises(StoreUnavailable, match="away"):
            await recovery.refresh(run)
        await asyncio.sleep(0)
        assert [ref() for ref in seen] == [None]
    finally:
        gc.enable()
