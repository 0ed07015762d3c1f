"""Registers the weight transfer as vLLM's general plugin, in every process that vLLM starts.

Below a rollout-worker it also ties each engine process's life to its parent's: a killed worker takes its engine with
it. On CPUs such an engine runs at a lower priority. A serving engine of a local cluster is tied too, at its own
priority.
"""

import multiprocessing
import os
import signal
import sys
from functools import wraps
from multiprocessing import spawn
from typing import Any, Final

from ebbtide.rollout_worker.engine.vllm import cpu_build

BACKEND: Final = "ebbtide"
#: Answers the calls of `VersionUpdates` in each of vLLM's workers.
EXTENSION: Final = "ebbtide.rollout_worker.engine.vllm.tile_transfer.WorkerExtension"
#: Variable that the rollout-worker sets for the engine processes below it.
_OWNER: Final = "EBBTIDE_ENGINE_OWNER_PID"
#: Set for the serving engine of a local cluster.
_TIED: Final = "EBBTIDE_ENGINE_TIED"

#: Runs before the program of a spawned process: it is killed when its parent (argument 1) dies, and then becomes that
#: program (the other arguments). 1 and 9: PR_SET_PDEATHSIG and SIGKILL.
_TIE: Final = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)

_registered = False


def register() -> None:
    """Called by vLLM once or more in each of its processes."""
    global _registered  # noqa: PLW0603 - vLLM may load plugins twice, and refuses a known name
    if not _registered:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine(
            BACKEND, "ebbtide.rollout_worker.engine.vllm.tile_transfer", "TileTransfer"
        )
        _registered = True
    parent = multiprocessing.parent_process()
    owned = bool(os.environ.get(_OWNER))
    if owned or os.environ.get(_TIED):
        tie_spawned()
    if (owned or os.environ.get(_TIED)) and parent is not None and parent.pid is not None:
        from ebbtide.runtime import die_with_parent

        die_with_parent(parent.pid)
        if owned and cpu_build.is_cpu_build():
            cpu_build.yield_to(parent.pid)


def tie_spawned() -> None:
    """Have the kernel kill the processes that this one spawns by `multiprocessing` when it dies, from their begin.

    vLLM loads plugins in an engine's process only after it has met its server. If the server dies before that, the
    process waits for it.
    """
    command_line = spawn.get_command_line
    if getattr(command_line, "ties", False):
        return

    @wraps(command_line)
    def tied(**options: Any) -> list[Any]:
        return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command_line(**options)]

    tied.__dict__["ties"] = True
    spawn.get_command_line = tied


def own_engine_processes() -> None:
    """Make this process the owner of the engine processes that it starts, spawned (see `register`) or forked.

    The kernel ties a child to the thread that started it: start the engine from the main thread.
    """
    from ebbtide.runtime import die_with_parent

    if os.environ.get(_OWNER) == str(os.getpid()):
        return  # done for the previous engine
    os.environ[_OWNER] = str(os.getpid())
    parent, on_cpu = [0], cpu_build.is_cpu_build()

    def before() -> None:
        parent[0] = os.getpid()

    def after_in_child() -> None:
        die_with_parent(parent[0])
        if on_cpu:
            cpu_build.yield_to(parent[0])
        # The child shares the event loop's wake-up pipe: the parent would take the child's signals for its own.
        signal.set_wakeup_fd(-1)

    os.register_at_fork(before=before, after_in_child=after_in_child)
