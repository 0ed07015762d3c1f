"""Bounds the live runs of each user, by the name in the token that submitted them.

Invariant: runs that are being submitted count, so calls at the same time do not pass the limit together. What is
remembered here can be read from the store again.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.errors import NoCapacity, NotFound, NotReady
from ebbtide.store.store import Store
from ebbtide.store.unexpected_data import UNEXPECTED

#: Runs end seldom.
_RETRY_AFTER_S: Final = 30.0


class RunQuota:
    def __init__(self, state: CoordinatorState, store: Store, *, limit: int) -> None:
        self._state, self._store, self._limit = state, store, limit
        self._submitters: dict[str, str | None] = {}  # of live runs; None: not known, asked again
        self._submitting = Counter[tuple[str, str]]()  # (run, submitter) of calls that have not ended

    @contextmanager
    def submitting(self, run_id: str, submitter: str) -> Iterator[None]:
        """Count a run while it is submitted."""
        self._submitting[run_id, submitter] += 1
        try:
            yield
        finally:
            self._submitting -= Counter([(run_id, submitter)])

    async def check(self, run_id: str, submitter: str) -> None:
        """Raise `NoCapacity` if the submitter has as many live runs as it may have. A run that exists is no new one."""
        if run_id in self._state.runs:
            return
        await self._learn()
        counted = {name for name in self._state.runs if self._submitters.get(name) == submitter}
        counted |= {name for name, other in self._submitting if other == submitter}
        if len(counted - {run_id}) < self._limit or await self._exists(run_id):
            return
        who = f"user {submitter} has" if submitter else "callers whose tokens have no name have"
        raise NoCapacity(
            f"{who} {self._limit} live runs, as many as max_runs_per_user of the coordinator allows; end one "
            "(ebbtide runs, ebbtide cancel), or ask an operator to raise it",
            retry_after_s=_RETRY_AFTER_S,
        )

    async def _learn(self) -> None:
        """Read who submitted the live runs that are not known here: those of a former coordinator."""
        known = {name: who for name, who in self._submitters.items() if who is not None}
        self._submitters = {name: who for name, who in known.items() if name in self._state.runs}
        while unknown := self._state.runs.keys() - self._submitters.keys():  # others may come meanwhile
            for name in unknown:
                self._submitters[name] = None
                with suppress(NotFound, NotReady, *UNEXPECTED):  # gone, of a later release, or broken
                    self._submitters[name] = (await self._store.runs.read(name)).submitter

    async def _exists(self, run_id: str) -> bool:
        try:
            await self._store.runs.read(run_id)
        except NotFound:
            return False
        except (NotReady, *UNEXPECTED):
            return True
        return True
