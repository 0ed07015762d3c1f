"""Runs scripts under the coordinator's term, and turns common refusals into errors, for all topics."""

from typing import Any, Final

from ebbtide.errors import EbbtideError, Internal, LeaseSuperseded, NotFound
from ebbtide.store.link.store_connection import Argument, StoreConnection
from ebbtide.store.link.store_faults import StoreRefused
from ebbtide.store.lua_scripts import script
from ebbtide.store.store_keys import run_prefix
from ebbtide.types.run import LeaseRef


class Topic:
    """Base of the topics. Calls raise `StoreUnavailable`, `TermSuperseded`, `NotFound` (the run), `LeaseSuperseded`.

    `untaken`: live runs that this term could not take over or read, shared by the topics of one store. Nothing is
    written to them, nor deleted. Their fences may have a former term: then a write would seem to come from a superseded
    coordinator.
    """

    def __init__(self, link: StoreConnection, term: str, untaken: set[str] | None = None) -> None:
        self._link = link
        self._term = term
        self._untaken: Final = set[str]() if untaken is None else untaken

    async def _write(self, name: str, run_id: str, *args: Argument) -> Any:
        """Run a script that checks the term."""
        self._check_taken(run_id)
        return await self._run(name, run_id, self._term, *args)

    async def _leased(self, name: str, lease: LeaseRef, *args: Argument) -> Any:
        """Run a script that checks the term and the lease."""
        self._check_taken(lease.run_id)
        return await self._run(name, lease.run_id, self._term, lease.role, lease.fence, *args)

    def _check_taken(self, run_id: str) -> None:
        if run_id in self._untaken:
            raise Internal(f"run {run_id} has unexpected data in the store and is left alone; mend its keys")

    async def _run(self, name: str, run_id: str, *args: Argument) -> Any:
        try:
            return await self._link.run(script(name), run_prefix(run_id), *args)
        except StoreRefused as refused:
            raise _common(refused, run_id) or refused from None


def _common(refused: StoreRefused, run_id: str) -> EbbtideError | None:
    match refused.code:
        case "NORUN":
            return no_run(run_id)
        case "ENDED":
            return LeaseSuperseded(f"run {run_id} has ended ({refused.detail.lower()}); step down")
        case "LEASE":
            return LeaseSuperseded(f"the lease on run {run_id} was claimed by another holder; step down")
    return None


def no_run(run_id: str) -> NotFound:
    return NotFound(f"there is no run {run_id}; it was never submitted here, or its record has expired")
