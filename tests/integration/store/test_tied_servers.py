"""A tied redis-server dies with the program that started it, however that ends."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import wait_until

_OWNER = """
import pathlib, signal, sys
from tests.support.redis_servers import EmbeddedRedis
print(EmbeddedRedis(pathlib.Path(sys.argv[1]), tied=True).start().pid, flush=True)
signal.pause()
"""


def server_of_killed(directory: Path, ends: signal.Signals) -> int:
    """The id of a server that was there when its owner was ended."""
    command = [sys.executable, "-c", _OWNER, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert psutil.pid_exists(pid)
        owner.send_signal(ends)
    return pid


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM])
async def test_a_tied_server_dies_with_a_program_that_is_killed(tmp_path: Path, ends: signal.Signals) -> None:
    pid = server_of_killed(tmp_path, ends)
    await wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
