"""Decides whether a run's newest version satisfies what a request wishes. Pure."""

from ebbtide.errors import NotReady, VersionUnavailable
from ebbtide.gateway.generation.text_request import VersionWish
from ebbtide.types.run import Run


def is_satisfied(wish: VersionWish, run: Run) -> bool:
    """Whether workers can generate under the wish now or soon: they have the newest version, or are to get it."""
    newest = run.newest.version if run.newest else 0
    return newest >= max(1, wish.min_version) and wish.exact_version in (0, newest)


def unsatisfied(wish: VersionWish, run: Run) -> NotReady:
    """The error that says why. A `VersionUnavailable` concerns this wish alone."""
    if run.newest is None:
        return NotReady(f"run {run.run_id} has no policy version yet; try again once its trainer has published one")
    newest = run.newest.version
    if wish.exact_version and newest > wish.exact_version:
        return VersionUnavailable(
            f"weight_version.exact_version: run {run.run_id} has gone on to version {newest}, and no worker goes back "
            f"to {wish.exact_version}; ask for a newer one"
        )
    wanted = wish.exact_version or wish.min_version
    name = "exact_version" if wish.exact_version else "min_version"
    return VersionUnavailable(
        f"weight_version.{name}: the newest version of run {run.run_id} is {newest}, and {wanted} is not there yet; "
        "try again"
    )


def version_bounds(wish: VersionWish) -> tuple[int, int]:
    """The least and the highest version that may sample a token; 0: no bound."""
    return max(wish.min_version, wish.exact_version), wish.exact_version
