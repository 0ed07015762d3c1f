"""A service process: readiness, signals, crashes, exit codes, and no orphan behind a parent that died."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from ebbtide.auth.roles import Role
from ebbtide.cli.credentials import certificates
from ebbtide.errors import StoreUnavailable
from ebbtide.runtime import Aside, race, write_atomically
from tests.support.waiting import wait_until

PREAMBLE = """
import asyncio, os, sys
from ebbtide.errors import StoreUnavailable
from ebbtide.runtime import ProcessSettings, Shutdown, run

async def wait(shutdown):
    shutdown.ready("127.0.0.1:1")
    await shutdown.requested.wait()
    print("stopping", flush=True)

async def crash(error):
    await asyncio.sleep(0)
    raise error
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(body: str, name: str = "wait", settings: str = "ProcessSettings()") -> subprocess.Popen[str]:
        code = f"{PREAMBLE}\n{body}\nrun({name}, 'probe', {settings})"
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def events(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_the_service_to_end_and_it_ends_well(start: Start, number: signal.Signals) -> None:
    process = start("")
    assert first_line(process) == "READY probe 127.0.0.1:1\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "stopping\n")
    assert [event["event"] for event in events(err)] == ["asked to end", "ended"]


def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    process = start(
        "async def stuck(shutdown):\n    await wait(shutdown)\n    await asyncio.Event().wait()", name="stuck"
    )
    first_line(process)
    process.send_signal(signal.SIGINT)
    assert first_line(process) == "stopping\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130


def test_the_ready_file_is_whole_and_tells_address_metrics_and_pid(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    process = start("", settings=f"ProcessSettings(ready_file={str(path)!r}, metrics_port=0)")
    line = first_line(process).split()
    told = json.loads(path.read_text())
    assert told == {"address": "127.0.0.1:1", "metrics": int(line[-1]), "pid": process.pid}
    assert told["metrics"] > 0
    assert [child.name for child in tmp_path.iterdir()] == ["ready.json"]


def test_metrics_are_bound_where_the_settings_say(start: Start) -> None:
    process = start("", settings="ProcessSettings(metrics_port=0, metrics_host='127.0.0.2')")
    port = first_line(process).split()[-1]
    with urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=20) as answer:
        assert b"process_resident_memory_bytes" in answer.read()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20)


def test_metrics_say_when_certificates_end_and_follow_their_files(start: Start, tmp_path: Path) -> None:
    certificates.init(tmp_path, 30)
    certificates.issue(tmp_path, "c", [Role.RELAY], [], 3)
    pair = f"tls_cert={str(tmp_path / 'c.pem')!r}, tls_key={str(tmp_path / 'c.key')!r}"
    body = "from ebbtide.auth.security import ServerSettings\nfrom ebbtide.weight_relay.settings import RelaySettings"
    process = start(body, settings=f"RelaySettings(data_dir='d', metrics_port=0, server=ServerSettings({pair}))")
    port = first_line(process).split()[-1]

    def days() -> list[int]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = [line.split() for line in lines if line.startswith("ebbtide_credentials_expire")]
        assert all(name.endswith('{kind="certificate"}') for name, _ in found)
        return [round((float(value) - time.time()) / 86400) for _, value in found]

    assert days() == [3]
    certificates.renew(tmp_path, "c", 9)
    assert days() == [9]
    (tmp_path / "c.pem").unlink()
    assert days() == [9]


def test_a_crashed_background_task_ends_the_process_and_says_why(start: Start) -> None:
    process = start(
        "async def main(shutdown):\n"
        "    shutdown.spawn(crash(StoreUnavailable('redis at /s is gone; start it')), 'renewal')\n"
        "    await wait(shutdown)",
        name="main",
    )
    out, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert out.endswith("stopping\n")
    (failed,) = [event for event in events(err) if event["event"] == "failed"]
    assert failed["task"] == "renewal"
    assert failed["reason"] == "redis at /s is gone; start it"


def test_a_crash_ends_the_process_though_its_main_function_hangs(start: Start) -> None:
    process = start(
        "import ebbtide.runtime\n"
        "ebbtide.runtime._CRASH_GRACE_S = 0.1\n"
        "async def main(shutdown):\n"
        "    shutdown.spawn(crash(KeyError('x')), 'pump')\n"
        "    await asyncio.Event().wait()",
        name="main",
    )
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "KeyError: 'x'" in err
    assert "not ended in time" in err


def test_a_main_function_that_fails_gives_exit_code_1(start: Start) -> None:
    process = start("", name="lambda shutdown: crash(StoreUnavailable('no redis'))")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert [event.get("reason") for event in events(err) if event["event"] == "failed"] == ["no redis"]


def test_background_tasks_are_cancelled_and_awaited_at_the_end(start: Start) -> None:
    process = start(
        "async def background():\n"
        "    try:\n"
        "        await asyncio.Event().wait()\n"
        "    finally:\n"
        "        await asyncio.sleep(0)\n"
        "        print('cleaned', flush=True)\n"
        "async def main(shutdown):\n"
        "    shutdown.spawn(background(), 'b')\n"
        "    await asyncio.sleep(0)",
        name="main",
    )
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "cleaned\n")


async def test_a_process_dies_with_the_parent_that_it_was_told_of(tmp_path: Path) -> None:
    """The parent is SIGKILLed, so that it can do nothing for its child."""
    ready = tmp_path / "ready"
    child = f"{PREAMBLE}\nrun(wait, 'c', ProcessSettings(ready_file={str(ready)!r}, die_with_parent=int(sys.argv[1])))"
    parent = (
        "import os, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())], stdout=subprocess.DEVNULL).wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])  # noqa: ASYNC220 - quick, and killed at once
    try:
        await wait_until(ready.exists, timeout=20)
        pid = json.loads(ready.read_text())["pid"]
        orphan = psutil.Process(pid)
    finally:
        process.kill()
        process.wait()
    await wait_until(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE, timeout=10)


def test_a_process_whose_parent_is_gone_already_does_not_start(start: Start) -> None:
    process = start("", settings=f"ProcessSettings(die_with_parent={os.getppid()})")
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (1, "")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]


async def test_a_race_ends_the_losers_and_raises_the_innermost_error() -> None:
    ended: list[str] = []

    async def loser() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("loser")

    async def failing() -> None:
        raise StoreUnavailable("inner")

    async def group() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(failing())

    with pytest.raises(StoreUnavailable, match="inner"):
        await race(loser(), group())
    assert ended == ["loser"]
    assert await race(loser(), asyncio.sleep(0)) == 1


async def test_what_is_done_aside_is_done_in_turn_in_one_thread_though_nobody_waits() -> None:
    aside, go, done = Aside("aside"), threading.Event(), list[str]()

    def first() -> None:
        go.wait()
        done.append(threading.current_thread().name)

    waiting = asyncio.ensure_future(aside.do(first))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(StoreUnavailable, match="second"):
        await asyncio.gather(aside.do(lambda: _fail("second")), asyncio.to_thread(go.set))
    assert await aside.do(lambda: [*done, threading.current_thread().name]) == ["aside", "aside"]


async def test_what_was_begun_aside_is_waited_for_at_the_end_but_not_for_ever() -> None:
    aside, go, done = Aside("aside that ends"), threading.Event(), list[str]()
    waiting = asyncio.ensure_future(aside.do(partial(_wait_and_note, go, done)))
    await asyncio.sleep(0)
    await aside.close(timeout_s=0.01)
    assert not waiting.done()
    go.set()
    await waiting
    await wait_until(lambda: not any(thread.name == "aside that ends" for thread in threading.enumerate()), timeout=30)
    assert done == ["first"]


async def test_what_was_done_aside_is_let_go_before_the_next_comes() -> None:
    class Held:
        pass

    aside, held = Aside("aside"), Held()
    known = weakref.ref(held)
    await aside.do(partial(id, held))
    assert known() is held
    del held
    await wait_until(lambda: known() is None, timeout=30)


def _wait_and_note(go: threading.Event, done: list[str]) -> None:
    go.wait()
    done.append("first")


def _fail(text: str) -> None:
    raise StoreUnavailable(text)


def test_what_is_still_done_aside_holds_up_no_end(start: Start) -> None:
    body = (
        "from ebbtide.runtime import Aside\n"
        "import threading\n"
        "async def main(shutdown):\n"
        "    asyncio.ensure_future(Aside('aside').do(threading.Event().wait))\n"
        "    await asyncio.sleep(0)\n"
        "    shutdown.ready('')\n"
    )
    assert start(body, name="main").wait(30) == 0


def test_a_service_manager_that_waits_for_word_is_told_when_it_is_ready_and_when_it_ends(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(60)
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        process = start("")
        assert manager.recv(64) == b"READY=1"
        process.terminate()
        assert manager.recv(64) == b"STOPPING=1"
    assert process.wait(60) == 0


def test_a_service_manager_that_does_not_listen_harms_nobody(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    process = start("")
    assert first_line(process).startswith("READY probe")
    process.terminate()
    assert process.wait(60) == 0


def test_a_process_that_hides_its_memory_can_be_read_by_none_of_its_users() -> None:
    code = "import ctypes; from ebbtide.runtime import hide_memory; hide_memory(); print(ctypes.CDLL(None).prctl(3))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "0\n"  # PR_GET_DUMPABLE
