"""Shows what a relay knows of a run's versions, to people and as JSON."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ebbtide.cli.cluster_connection import relay_of
from ebbtide.cli.views.tables import amount, cell, clock, data_table, plain, watch
from ebbtide.types.weights import HolderState, LinkState, PatchState, VersionState, WeightsState

if TYPE_CHECKING:
    from ebbtide.client import Client

_VERSIONS: Final = ("version", "step", "age", "dense", "", "from", "patch", "smaller", "changed", "")
_HOLDERS: Final = ("holder", "site", "version", "", "paused", "heard")
_LINKS: Final = ("to site", "sent", "lately", "limit")
_LEFT: Final = ("", "holder", "site", "to site")


def pictures(state: WeightsState) -> Group:
    """Draws a summary line, and tables of versions, of their holders, and of links."""
    tables = [_table(_VERSIONS, [row for one in state.versions for row in _version_rows(one, state)])]
    tables += [_table(_HOLDERS, [_holder_row(one, state) for one in state.holders])] if state.holders else []
    tables += [_table(_LINKS, [_link_row(one) for one in state.links])] if state.links else []
    spaced = [part for table in tables for part in (Text(), table)]
    return Group(Text(plain(head(state)), style="bold"), *spaced)


def head(state: WeightsState) -> str:
    """Sums up the versions in a line: the newest one's size, and how many hold it."""
    if not state.versions:
        return "no version is here yet"
    newest = state.versions[-1]
    info = newest.info.version
    have = [one for one in state.holders if (one.policy, one.version) == (info.policy, info.version)]
    whole = sum(one.done for one in have)
    best = min(newest.patches, key=lambda patch: patch.size, default=None)
    told = f"; a patch from {best.base} takes {_smaller(best, newest)} less" if best and best.size else ""
    coming = f", {len(have) - whole} fetch it" if len(have) > whole else ""
    return (
        f"{len(state.versions)} versions, the newest {_name(info.policy, info.version, state)} "
        f"of {amount(newest.info.size)}{told}; {whole} have it{coming}"
    )


def lines(state: WeightsState) -> Iterator[str]:
    """A summary line, and one for each version, holder and link: for output that is no terminal."""
    yield plain(head(state))
    for version in state.versions:
        (row, *more) = _version_rows(version, state)
        patches = [f"from {one[5]} {one[6]} ({one[7]} smaller, {one[8]} changed)" for one in (row, *more) if one[5]]
        told = "; ".join([f"step {row[1]}", row[3] + (f", {row[4]}" if row[4] else ""), *patches])
        yield plain(f"version {row[0]}: {told}")
    for holder in state.holders:
        name, site, version_name, does, paused, heard = _holder_row(holder, state)
        at = f" at {site}" if site else ""
        yield plain(f"{name}{at} {does} version {version_name}; paused {paused}; heard {heard} ago")
    for link in state.links:
        site, sent, lately, limit = _link_row(link)
        yield plain(f"to site {site or '(unnamed)'}: {sent} sent, lately {lately}, limit {limit}")


async def watch_weights(client: "Client", run_id: str, every_s: float, console: Console | None = None) -> None:
    """Shows the versions until cancelled. Raises `Unavailable` if the relay stays unreachable."""
    await watch(relay_of(client), lambda: client.describe_weights(run_id), pictures, lines, every_s, console)


def _version_rows(one: VersionState, state: WeightsState) -> list[tuple[str, ...]]:
    """A row for the version with its first patch, and one for each further patch."""
    info = one.info.version
    head = (
        _name(info.policy, info.version, state),
        str(info.step),
        clock(one.age_s),
        amount(one.info.size),
        "keyframe" if one.keyframe else "",
    )
    patches = [_patch_cells(patch, one) for patch in one.patches] or [("",) * 5]
    return [(head if not index else ("",) * len(head)) + cells for index, cells in enumerate(patches)]


def _patch_cells(patch: PatchState, to: VersionState) -> tuple[str, ...]:
    composed = "composed" if patch.composed else ""
    return (str(patch.base), amount(patch.size), _smaller(patch, to), f"{patch.density:.2%}", composed)


def _smaller(patch: PatchState, to: VersionState) -> str:
    """How many times smaller than the dense version."""
    return f"{to.info.size / patch.size:,.3g}x" if patch.size else "-"


def _holder_row(one: HolderState, state: WeightsState) -> tuple[str, ...]:
    does = "has" if one.done else "fetches"
    paused = f"{1000 * one.install_s:,.0f} ms" if one.install_s else "-"
    version = _name(one.policy, one.version, state)
    return (one.holder.name, one.holder.site, version, does, paused, f"{one.seen_s:.0f} s")


def _link_row(one: LinkState) -> tuple[str, ...]:
    limit = f"{amount(one.limit)}/s" if one.limit else "none"
    return (one.site, amount(one.bytes), f"{amount(one.bytes_per_s)}/s", limit)


def _name(policy: str, version: int, state: WeightsState) -> str:
    """The version's number, with its policy if there are several."""
    several = len({one.info.version.policy for one in state.versions} | {one.policy for one in state.holders}) > 1
    return f"{policy} {version}" if several else str(version)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = data_table(columns, left=_LEFT, wraps=_LEFT)
    for row in rows:
        table.add_row(*map(cell, row))
    return table
