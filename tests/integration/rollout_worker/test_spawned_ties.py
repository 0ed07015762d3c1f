"""A process that an engine's server spawns dies with the server from its begin, before it has loaded anything."""

import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.waiting import wait_until

_SERVER = """
import multiprocessing, time
from ebbtide.rollout_worker.engine.vllm.vllm_plugin import tie_spawned
if __name__ == "__main__":
    tie_spawned()
    tie_spawned()
    context = multiprocessing.get_context("spawn")
    done = context.Process(target=abs, args=(1,))
    done.start()
    done.join()
    child = context.Process(target=time.sleep, args=(600,))
    child.start()
    print(done.exitcode, child.pid, flush=True)
    child.join()
"""


def child_of_killed(folder: Path) -> tuple[int, int]:
    """The exit code of a spawned process that ended, and the id of one that was there when its parent was killed."""
    program = folder / "server.py"
    program.write_text(_SERVER)
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        code, pid = map(int, server.stdout.readline().split())
        assert psutil.pid_exists(pid)
        server.kill()
    return code, pid


async def test_a_spawned_process_works_and_dies_with_its_parent(tmp_path: Path) -> None:
    code, pid = child_of_killed(tmp_path)
    assert code == 0
    await wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
