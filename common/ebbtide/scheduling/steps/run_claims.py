"""Chooses the run for a trainer or a driver that asks for any.

A run continues only while both its roles are held. So a process that restarts under another name must return to the run
whose other role still waits for it, and not begin a younger one while its former lease runs out.
"""

from collections.abc import Iterable

from msgspec import Struct

from ebbtide.errors import NotReady


class ClaimableRun(Struct, frozen=True, kw_only=True):
    """A live run as one role sees it."""

    run_id: str
    holder: str = ""  # of the role; "": it is free
    renewed_s: float = 0.0  # since the holder renewed its lease
    paired: bool = False  # the other role is held


def choose(runs: Iterable[ClaimableRun], *, role: str, holder: str, waited_s: float) -> str:
    """The id of `holder`'s run, of `runs`, oldest first: its own; else one that lacks only this role; else any that
    lacks it, if the holders of all older ones renewed within the `waited_s` for which the caller has asked. Raises
    `NotReady`.
    """
    known = list(runs)
    for run in known:
        if run.holder == holder:
            return run.run_id
    for run in known:
        if run.paired and not run.holder:
            return run.run_id
    for run in known:
        if not run.holder:
            return run.run_id
        if run.renewed_s > waited_s:
            raise NotReady(
                f"{run.holder} may have left run {run.run_id} without a {role}; that is seen to first, ask again"
            )
    raise NotReady(f"no run wants a {role}; submit one, or wait")
