"""Which run a trainer or a driver is given that asks for any.

A run goes on only while both its roles are held. So whoever starts again under another name must find back to the run
whose other half still waits for it, and not begin a younger one while the lease of its former life runs out.
"""

from collections.abc import Iterable

from msgspec import Struct

from ebbtide.errors import NotReady


class ClaimableRun(Struct, frozen=True, kw_only=True):
    """A live run as one role sees it: `holder` ("": free) renewed its lease `renewed_s` ago; `paired`: somebody holds
    the other role.
    """

    run_id: str
    holder: str = ""
    renewed_s: float = 0.0
    paired: bool = False


def choose(runs: Iterable[ClaimableRun], *, role: str, holder: str, waited_s: float) -> str:
    """The id of the run that `holder` is given, of `runs`, oldest first: its own; else one that lacks only this role;
    else any that lacks it, if all older ones have a holder who has renewed within the `waited_s` that the caller has
    asked. Raises `NotReady`.
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
