"""What DescribeVersions shows: a run's versions here, who has them, and what went over each link."""

from collections.abc import Iterator

from ebbtide.types.weights import PatchState, VersionState, WeightsState
from ebbtide.weight_relay.library.version_index import VersionIndex
from ebbtide.weight_relay.library.version_records import PatchEdge
from ebbtide.weight_relay.outlets.holder_table import HolderTable
from ebbtide.weight_relay.outlets.link_table import LinkTable


def describe(index: VersionIndex, holders: HolderTable, links: LinkTable, run_id: str, now: float) -> WeightsState:
    """The state of all policies of a run. `now` is on the clock of the index' `since`."""
    shown, more = holders.states(run_id)
    return WeightsState(
        versions=tuple(_versions(index, run_id, now)),
        holders=tuple(shown),
        more_holders=more,
        links=tuple(links.states()),
    )


def _versions(index: VersionIndex, run_id: str, now: float) -> Iterator[VersionState]:
    """By policy, oldest first."""
    for stream in sorted(stream for stream in index.streams() if stream[0] == run_id):
        edges = index.patches(stream)
        for number, holding in sorted(index.stream(stream).items()):
            patches = [_patch(edge) for (_, version), edge in sorted(edges.items()) if version == number]
            age_s = max(0.0, now - holding.since)
            yield VersionState(info=holding.info, anchor=holding.anchor, patches=tuple(patches), age_s=age_s)


def _patch(edge: PatchEdge) -> PatchState:
    patch = edge.patch
    density = patch.changed / patch.elements if patch.elements else 0.0
    return PatchState(base=patch.base.version, size=patch.size, density=density, composed=edge.composed)
