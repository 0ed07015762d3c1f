"""Environment code cannot take the driver down."""

import asyncio
import sys
import threading

import pytest

from ebbtide.driver import environments
from ebbtide.driver.environments import EnvironmentHangs, EnvironmentThreads
from ebbtide.driver.host_process import TookTooLong
from tests.support.waiting import wait_until


async def test_values_and_errors_come_back() -> None:
    box = EnvironmentThreads(2)
    assert await box.call(lambda: 3, timeout_s=5) == 3
    with pytest.raises(ZeroDivisionError):
        await box.call(lambda: 1 // 0, timeout_s=5)
    with pytest.raises(TimeoutError):  # the environment's own, not the sandbox's
        await box.call(lambda: _raise(TimeoutError("of a socket")), timeout_s=5)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), StopIteration()])
async def test_what_would_end_the_process_is_an_ordinary_error_here(error: BaseException) -> None:
    with pytest.raises(RuntimeError, match="environment code raised"):
        await EnvironmentThreads(1).call(lambda: _raise(error), timeout_s=5)


async def test_a_call_that_does_not_return_is_abandoned_and_its_place_given_on() -> None:
    box, release = EnvironmentThreads(1), threading.Event()
    with pytest.raises(TookTooLong):
        await box.call(lambda: release.wait(10), timeout_s=0.05)
    assert box.stuck == 1
    assert await box.call(lambda: "next", timeout_s=5) == "next"
    release.set()
    await wait_until(lambda: box.stuck == 0)


async def test_too_many_stuck_calls_are_the_environments_fault_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "MAX_STUCK", 2)
    box, release = EnvironmentThreads(1), threading.Event()
    for _ in range(2):
        with pytest.raises(TookTooLong):
            await box.call(lambda: release.wait(10), timeout_s=0.01)
    with pytest.raises(EnvironmentHangs, match="2 calls"):
        await box.call(lambda: None, timeout_s=1)
    release.set()
    await wait_until(lambda: box.stuck == 0)


async def test_as_many_run_at_once_as_there_are_places_and_no_more() -> None:
    box, running, most, lock, three = EnvironmentThreads(3), 0, 0, threading.Lock(), threading.Barrier(3)

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three.wait(5)
        with lock:
            running -= 1

    await asyncio.gather(*(box.call(work, timeout_s=5) for _ in range(21)))
    assert most == 3


def test_a_stuck_call_does_not_keep_the_process() -> None:
    import subprocess

    code = (
        "import asyncio, threading\n"
        "from ebbtide.driver.environments import EnvironmentThreads\n"
        "from ebbtide.driver.host_process import TookTooLong\n"
        "async def main():\n"
        "    try: await EnvironmentThreads(1).call(threading.Event().wait, timeout_s=0.01)\n"
        "    except TookTooLong: pass\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def _raise(error: BaseException) -> None:
    raise error
