"""A program that runs a serving engine leaves no process of it behind, however and whenever it ends."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
_BOOT_S = 240.0


@contextmanager
def owner(folder: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A program that runs an engine, and the engine's first process."""
    command = [sys.executable, "-m", "tests.e2e.engine_owner", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        server = psutil.Process(int(program.stdout.readline()))
        try:
            yield program, server
        finally:
            program.kill()


async def engine_core(server: psutil.Process) -> list[psutil.Process]:
    """The server and all below it, once it has begun to start the engine's own process."""
    found: list[psutil.Process] = []

    def begun() -> bool:
        found[:] = [server, *server.children(recursive=True)]
        return any(map(is_engine, found[1:]))

    await wait_until(begun, timeout=_BOOT_S, what="the engine's process")
    return found


def is_engine(process: psutil.Process) -> bool:
    try:
        return "spawn_main" in " ".join(process.cmdline()) or "EngineCore" in process.name()
    except psutil.Error:  # it was one of the short programs that vLLM asks about the machine
        return False


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(("ends", "when"), [(signal.SIGKILL, "booting"), (signal.SIGTERM, "ready")])
async def test_an_engine_dies_with_the_program_that_runs_it(tmp_path: Path, ends: signal.Signals, when: str) -> None:
    with owner(tmp_path) as (program, server):
        found = await engine_core(server)
        if when == "ready":
            assert program.stdout is not None
            assert program.stdout.readline().strip() == "ready"
            found = [server, *server.children(recursive=True)]
        assert len(found) >= 2
        program.send_signal(ends)
        program.wait()
        await wait_until(lambda: all(map(gone, found)), timeout=30, what="the end of all the engine's processes")
