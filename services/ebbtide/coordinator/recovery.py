"""Reading runs back from the store: at the start, and whenever the mirror may have missed something.

Attempts that the store has as running, and that no attached worker holds, wait for their worker until `grace`; then
they are re-queued like any orphan.
"""

import time

from ebbtide import telemetry
from ebbtide.coordinator.attempts import waiting
from ebbtide.coordinator.state import Attempt, Orphaned, RunState, State
from ebbtide.errors import LeaseSuperseded
from ebbtide.store.rows import Open
from ebbtide.store.rows import State as RolloutState
from ebbtide.store.store import Store
from ebbtide.types.run import Run

log = telemetry.get_logger(__name__)


class Recovery:
    def __init__(self, state: State, store: Store, *, grace_s: float) -> None:
        self._state, self._store = state, store
        self._until = time.monotonic() + grace_s

    async def take_over(self) -> None:
        """Become the store's coordinator and load every live run; ended ones are noted for deletion."""
        live = await self._store.runs.take_over()
        for run_id in live:
            await self.add(await self._store.runs.read(run_id))
        for run_id in set(await self._store.runs.ids()) - set(live):
            self._state.ended.add(run_id)
        log.info(
            "took over", runs=len(live), rollouts=sum(len(r.line) + len(r.running) for r in self._state.runs.values())
        )

    async def add(self, run: Run) -> RunState:
        """Mirror a live run."""
        found = self._state.runs.setdefault(run.run_id, RunState(run.run_id, run.spec))
        found.fitted |= run.counters.get("tokens_stored", 0) > 0
        await self.refresh(found)
        return found

    async def live(self, run_id: str) -> RunState:
        """The live run. Raises `LeaseSuperseded` after its end, `NotFound` if there never was one."""
        if (run := self._state.runs.get(run_id)) is not None:
            return run
        record = await self._store.runs.read(run_id)
        if record.status.ended:
            raise LeaseSuperseded(f"run {run_id} has ended ({record.status.name.lower()}); step down")
        return await self.add(record)

    async def refresh(self, run: RunState) -> None:
        """Make a stale mirror true again."""
        async with run.lock:
            if not run.stale or run.ended:
                return
            run.stale = False
            ended: set[str] = set()
            run.ended_lately = ended
            try:
                await self._read(run, ended)
            except BaseException:
                run.stale = True
                raise
            finally:
                run.ended_lately = None
        self._state.wake.set()
        self._state.reap.set()

    async def _read(self, run: RunState, ended: set[str]) -> None:
        known = await self._store.runs.versions(run.run_id)
        rows = [row async for row in self._store.rollouts.open_rollouts(run.run_id)]
        # From here on nothing is awaited: what ended while rows were read is in `ended`.
        run.versions = {v: record for v, record in known.items() if v in run.versions or v not in run.failed_installs}
        rows = [row for row in rows if row.request.rollout_id not in ended]
        before, run.running = run.running, {}
        for stood in list(run.line):
            run.line.remove(stood.rollout_id)
        for row in rows:
            rollout_id = row.request.rollout_id
            if row.state is RolloutState.QUEUED:
                run.line.add(waiting(row.request, place=row.place, length=row.prompt_len + row.stored))
            else:
                run.running[rollout_id] = self._attempt(row, run.run_id, before.get(rollout_id))
        self._drop_lost(run, before)

    def _attempt(self, row: Open, run_id: str, before: Attempt | None) -> Attempt:
        if before is not None and before.attempt_id == row.attempt_id:
            return before
        return Attempt(
            run_id=run_id,
            attempt_id=row.attempt_id,
            waiting=waiting(row.request, place=row.place, length=row.prompt_len + row.stored),
            start=row.stored,
            max_tokens=row.request.sampling.max_tokens,
            orphaned=Orphaned(self._until, "its worker did not come back to the restarted coordinator", False),
        )

    def _drop_lost(self, run: RunState, before: dict[str, Attempt]) -> None:
        """Attempts that workers hold and the store does not: they are over."""
        for rollout_id, attempt in before.items():
            if run.running.get(rollout_id) is not attempt and attempt.session is not None:
                attempt.session.cancel([attempt.ref])
                attempt.session.attempts.pop(attempt.attempt_id, None)
