"""Workers that share a group get each other's stored tokens with their answers: in order, once, and nothing else."""

from typing import Any

from ebbtide.rollout_worker.streams.sibling_client import SiblingClient
from ebbtide.testing import wait_until
from ebbtide.types.rollout import RolloutKind
from ebbtide.types.tail_spec import TailSpec
from ebbtide.v1 import types_pb2
from tests.fakes.sibling_sink import RecordedSink

STOP = types_pb2.FINISH_REASON_STOP
GROUPED = TailSpec(speculation="grouped")


class Pair:
    """Two workers that draft, each of which has one slot more than it is given."""

    def __init__(self, cluster: Any, run: Any) -> None:
        self.cluster, self.run = cluster, run
        self.sinks: dict[str, RecordedSink] = {}
        self.workers: dict[str, Any] = {}

    async def attach(self, name: str, *, slots: int = 1, **more: Any) -> Any:
        """A worker that keeps what its process had, if it was there before."""
        sink = self.sinks.setdefault(name, RecordedSink())
        before = self.workers.get(name)
        made = await self.cluster.worker(name, slots=slots, installs=True, capabilities=[], **more) if False else None
        assert made is None
        worker = self.cluster.unattached(name, slots=slots)
        worker.siblings = before.siblings if before is not None else SiblingClient(sink)
        self.workers[name] = await worker.attach(capabilities=["resume", "siblings"], **more)
        return self.workers[name]

    def ids(self, name: str, group: str = "g") -> dict[str, list[int]]:
        return self.sinks[name].ids.get(group, {})
