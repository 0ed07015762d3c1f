"""Registers the weight transfer as vLLM's general plugin, in every process that vLLM starts.

Below a rollout-worker it also ties each engine process's life to its parent's: a killed worker takes its engine with
it. On CPUs such an engine runs at a lower priority. A serving engine of a local cluster is tied too, at its own
priority.
"""

import multiprocessing
import os
import signal
from typing import Final

from ebbtide.rollout_worker.engine.vllm import cpu_build

BACKEND: Final = "ebbtide"
#: Answers the calls of `VersionUpdates` in each of vLLM's workers.
EXTENSION: Final = "ebbtide.rollout_worker.engine.vllm.weights.tile_transfer.WorkerExtension"
#: Variable that the rollout-worker sets for the engine processes below it.
_OWNER: Final = "EBBTIDE_ENGINE_OWNER_PID"
#: Set for the serving engine of a local cluster.
_TIED: Final = "EBBTIDE_ENGINE_TIED"

_registered = False


def register() -> None:
    """Called by vLLM once or more in each of its processes."""
    global _registered  # noqa: PLW0603 - vLLM may load plugins twice, and refuses a known name
    if not _registered:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        WeightTransferEngineFactory.register_engine(
            BACKEND, "ebbtide.rollout_worker.engine.vllm.weights.tile_transfer", "TileTransfer"
        )
        _registered = True
    parent = multiprocessing.parent_process()
    owned = bool(os.environ.get(_OWNER))
    if (owned or os.environ.get(_TIED)) and parent is not None and parent.pid is not None:
        from ebbtide.runtime import die_with_parent

        die_with_parent(parent.pid)
        if owned and cpu_build.is_cpu_build():
            cpu_build.yield_to(parent.pid)


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
