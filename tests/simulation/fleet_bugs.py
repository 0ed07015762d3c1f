"""Planted bugs that do harm only to several runs, or with two coordinators."""

from typing import Any, Final

from ebbtide.coordinator import append_streams
from ebbtide.coordinator.append_streams import AppendBatcher
from ebbtide.coordinator.dispatch.worker_allocator import WorkerAllocator
from ebbtide.coordinator.election import STEADY_S, TTL_S, LeaderTenure, StandbyWatch
from ebbtide.coordinator.run_recovery import RunRecovery
from ebbtide.coordinator.state.worker_session import WorkerSession
from ebbtide.rpc.server import Server
from ebbtide.store.runs import RunTopic
from tests.simulation.planting import Bug, both, lua, python


class _OneQueue(dict[str, Any]):
    """Finds the messages of whichever run has some."""

    def get(self, _run_id: str, _default: Any = None) -> Any:
        return next(iter(self.values()), None)


def _queues_all_in_one(init: Any) -> Any:
    def wrong(self: AppendBatcher, *args: Any) -> None:
        init(self, *args)
        self._queues = _OneQueue()

    return wrong


def _demands_of_the_first(demands: Any) -> Any:
    """Later runs of the same name get no worker until it is over."""

    def wrong(self: WorkerAllocator, *args: Any) -> Any:
        first = {run.spec.name: run.run_id for run in reversed(list(self._state.runs.values()))}.values()
        return [one for one in demands(self, *args) if one.run_id in first]

    return wrong


def _reads_the_first_queue(take_over: Any) -> Any:
    """The others' queues stay empty: only what runs, or is new, is known."""

    async def wrong(self: RunRecovery) -> None:
        await take_over(self)
        for run in list(self._state.runs.values())[1:]:
            run.queue.replace(run.new_queue())

    return wrong


def _claims_the_first_run(take_over: Any) -> Any:
    async def wrong(self: RunTopic) -> list[str]:
        runs = [await self.read(run_id) for run_id in await self.ids()]
        live = [run.run_id for run in runs if not run.status.ended]
        for run_id in live[:1]:
            await self._write("claim_term", run_id)
        return live

    return wrong


def _is_free_anyway(free: Any) -> Any:
    def wrong(self: StandbyWatch, now: float, *, held: bool) -> bool:
        return bool(free(self, now, held=False)) and now - self._since > STEADY_S

    return wrong


FLEET_BUGS: Final[dict[str, Bug]] = {
    "an append for a leader that was superseded": lua(
        ("if have[1] ~= ARGV[1] then return barred(ARGV[1]) end", "if not have[1] then return barred(ARGV[1]) end")
    ),
    "a standby that serves": python(
        (Server, "closed", lambda _: property(lambda self: None, lambda self, why: None)),
    ),
    "a lease that is taken while it is held": both(
        lua(("if how == 'wait' and term and term ~= ARGV[1] then return address end\n", "")),
        python((StandbyWatch, "free", _is_free_anyway)),
    ),
    "a lapse of the lease that its holder ignores": python((LeaderTenure, "rest_s", lambda _: lambda self, now: TTL_S)),
    "a term that only the first run learns": python((RunTopic, "take_over", _claims_the_first_run)),
    "a takeover that reads the first run's queue": python((RunRecovery, "take_over", _reads_the_first_queue)),
    # Harmless as long as no two runs' messages are gathered at once; so they are gathered for longer.
    "an append that goes to the run before it": python(
        (AppendBatcher, "__init__", _queues_all_in_one), (append_streams, "_GATHER_S", lambda _: 0.05)
    ),
    "a share for the first run of a name alone": python((WorkerAllocator, "_demands", _demands_of_the_first)),
    "a version that counts for every run": python(
        (WorkerSession, "version_of", lambda _: lambda self, run_id: self.installed[1].version if self.installed else 0)
    ),
    "a cancelled run that keeps its fence": lua(
        ("redis.call('DEL', FENCE)\n", "if ARGV[4] ~= 'CANCELLED' then redis.call('DEL', FENCE) end\n")
    ),
}
