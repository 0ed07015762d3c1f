"""The launcher on real processes that do nothing but live, die and have children."""

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest

from ebbtide.local_cluster.launcher import Launcher, LaunchFailed, launcher
from tests.integration.cli.stand_ins import alive, below, program
from tests.support.waiting import wait_until


async def test_programs_are_ended_stage_by_stage(tmp_path: Path) -> None:
    async with launcher(print) as made:
        await made.start(program(tmp_path, "store", stage=2))
        await made.start_all([program(tmp_path, "worker", stage=0), program(tmp_path, "coordinator", stage=1)])
        assert made.process("store").address == f"store:{made.process('store').pid}"
    assert (tmp_path / "order").read_text().split() == ["worker", "coordinator", "store"]
    assert below(os.getpid()) == []


async def test_a_program_that_ends_before_it_is_ready_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match=r"(?s)broken ended with status 3 before .*broken\.log:\nthe reason why"):
        async with launcher(print) as made:
            await made.start_all([program(tmp_path, "good"), program(tmp_path, "broken", mode="crash")])
    assert below(os.getpid()) == []


async def test_a_program_that_is_never_ready_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match=r"slow was not ready in 1 s"):
        async with launcher(print) as made:
            await made.start(program(tmp_path, "slow", mode="slow", boot_s=1.0))


async def test_a_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    async with launcher(print) as made:
        await made.start(program(tmp_path, "deaf", mode="deaf", stop_s=0.3))
    assert made.process("deaf").returncode == -signal.SIGKILL


async def test_a_program_that_is_ready_after_all_may_hand_over_though_nobody_waits_for_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.local_cluster.launcher._NOT_READY_S", 0.0)
    os.mkfifo(go := tmp_path / "worker.ready.go")
    async with launcher(print) as made:
        starting = asyncio.create_task(made.start(program(tmp_path, "worker", mode="late")))
        await asyncio.sleep(0)  # it is started in the task's first turn
        starting.cancel()
        await asyncio.wait({starting})
        (await asyncio.to_thread(go.open, "w")).close()
        assert not made.process("worker").address
        await wait_until((tmp_path / "worker.ready").exists)
    assert made.process("worker").returncode == 0
    assert (tmp_path / "order").read_text().split() == ["worker"]


async def test_a_program_that_dies_is_started_again_and_its_children_die_with_it(tmp_path: Path) -> None:
    told: list[str] = []
    async with launcher(told.append) as made:
        first = await made.start(program(tmp_path, "worker", mode="children"))
        (child,) = below(first.pid)
        os.kill(first.pid, signal.SIGKILL)
        await wait_until(lambda: made.process("worker").pid != first.pid and made.process("worker").address)
        assert alive([first.pid, child.pid]) == []
    assert told == ["worker ended with signal SIGKILL; it is started again"]


async def test_a_program_that_keeps_dying_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.local_cluster.launcher._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("ebbtide.local_cluster.launcher._MAX_PAUSE_S", 0.01)

    async def kill_for_ever(made: Launcher) -> None:
        while True:
            killed = made.process("worker").pid
            made.crash("worker")
            await wait_until(lambda: made.process("worker").pid != killed)  # noqa: B023 - called at once

    async with launcher(print) as made:
        await made.start(program(tmp_path, "worker"))
        with pytest.raises(LaunchFailed, match="worker ended 6 times, last with signal SIGKILL"):
            await made.during(kill_for_ever(made))


async def test_a_killed_program_is_gone_with_its_children_and_stays_gone(tmp_path: Path) -> None:
    told: list[str] = []
    async with launcher(told.append) as made:
        process = await made.start(program(tmp_path, "worker", mode="children"))
        pids = [process.pid, *(child.pid for child in below(process.pid))]
        made.kill("worker")
        await wait_until(lambda: alive(pids) == [])
        await made.start(program(tmp_path, "replacement"))
    assert len(pids) == 2
    assert told == []


@pytest.mark.parametrize("within_s", [10.0, 0.0])
async def test_a_retired_program_may_end_in_order_unless_it_is_given_no_time_and_stays_gone(
    tmp_path: Path, within_s: float
) -> None:
    told: list[str] = []
    async with launcher(told.append) as made:
        process = await made.start(program(tmp_path, "worker"))
        await made.retire("worker", within_s)
        assert not process.running()
        assert (tmp_path / "order").exists() == bool(within_s)
        await made.start(program(tmp_path, "replacement"))
    assert told == []


async def test_a_program_may_be_retired_while_it_boots(tmp_path: Path) -> None:
    async with launcher(print) as made:
        booting = asyncio.create_task(made.start(program(tmp_path, "worker", mode="slow")))
        await asyncio.sleep(0)
        booting.cancel()
        await asyncio.wait({booting})
        await made.retire("worker", 0.0)
        assert not made.process("worker").running()


def booting_after_kill(made: Launcher, pid: int) -> list[str]:
    """What another thread is told to boot once a process is dead, while the loop stands still."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with ThreadPoolExecutor(1) as other:
        return other.submit(lambda: made.booting).result()


async def test_who_asks_from_another_thread_what_boots_reaps_nothing(tmp_path: Path) -> None:
    async with launcher(print) as made:
        booting = asyncio.create_task(made.start(program(tmp_path, "worker", mode="slow")))
        await asyncio.sleep(0)
        process = made.process("worker")
        assert await asyncio.to_thread(lambda: made.booting) == ["worker"]
        assert booting_after_kill(made, process.pid) == ["worker"]
        assert process.returncode is None
        with pytest.raises(LaunchFailed, match="worker ended with signal SIGKILL before it was ready"):
            await booting
        assert made.booting == []


async def test_a_program_with_cores_runs_on_no_other(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    async with launcher(print) as made:
        process = await made.start(msgspec.structs.replace(program(tmp_path, "worker", mode="children"), cores=(core,)))
        assert [os.sched_getaffinity(one) for one in (process.pid, below(process.pid)[0].pid)] == [{core}, {core}]


async def test_a_child_in_a_session_of_its_own_does_not_escape(tmp_path: Path) -> None:
    async with launcher(print) as made:
        process = await made.start(program(tmp_path, "worker", mode="escaping"))
        (child,) = below(process.pid)
        assert os.getsid(child.pid) != process.pid
    assert alive([child.pid]) == []


HOST = """
import asyncio, sys
from pathlib import Path
from ebbtide.cli.interrupts import run
from ebbtide.local_cluster.launcher import Launcher, launcher
from tests.integration.cli.stand_ins import program

async def main():
    folder = Path(sys.argv[1])
    async with launcher(print) as made:
        await made.start(program(folder, "first", mode=sys.argv[3], tether=True))
        await made.start(program(folder, "second", mode=sys.argv[2], tether=True))
        await asyncio.Event().wait()

sys.exit(run(main))
"""


def host(folder: Path, mode: str, first: str = "children") -> "subprocess.Popen[bytes]":
    """A process with a launcher in it, whose second program is `mode`."""
    command = [sys.executable, "-c", HOST, str(folder), mode, first]
    return subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE)


@pytest.mark.parametrize("mode", ["good", "slow", "deaf"])
async def test_ctrl_c_leaves_no_process_whether_booting_or_running(tmp_path: Path, mode: str) -> None:
    with host(tmp_path, mode) as process:
        await wait_until(lambda: len(below(process.pid)) == 3, timeout=20)
        pids = [child.pid for child in below(process.pid)]
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 30) == 130
    assert alive(pids) == []


async def test_a_second_ctrl_c_does_not_wait_for_the_deaf(tmp_path: Path) -> None:
    with host(tmp_path, "deaf") as process:
        await wait_until(lambda: len(below(process.pid)) == 3, timeout=20)
        pids = [child.pid for child in below(process.pid)]
        process.send_signal(signal.SIGINT)
        await wait_until((tmp_path / "order").exists)  # the first program was asked to end, and did
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 4) == 130
        await wait_until(lambda: alive(pids) == [])  # the kernel kills what its parent leaves, a moment later


async def test_a_launcher_that_is_killed_takes_its_programs_with_it(tmp_path: Path) -> None:
    with host(tmp_path, "good", first="good") as process:
        await wait_until((tmp_path / "second.ready").exists, timeout=20)
        tied = [child.pid for child in psutil.Process(process.pid).children()]
        process.kill()
        await wait_until(lambda: alive(tied) == [])
    assert len(tied) == 2
