"""Who may call what: the one table of roles.

Invariant: it names every RPC of `ebbtide.v1` and no other (a test compares it with the contracts). What it does not
name nobody may call who comes with a role. Nothing of it changes while a process runs.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final


class Role(StrEnum):
    """What a token or a certificate is for."""

    USER = "user"
    OPERATOR = "operator"
    TRAINER = "trainer"  # and the episode driver
    WORKER = "worker"
    RELAY = "relay"
    COORDINATOR = "coordinator"  # these two serve and call nobody: certificates bear them
    GUARD = "guard"


#: Roles whose tokens may be bound to a run: the others' work is on the fleet.
OF_ONE_RUN: Final = frozenset({Role.USER, Role.TRAINER})
#: Roles whose tokens a worker that serves its peers may see: they may do no more than its own.
AMONG_PEERS: Final = frozenset({Role.WORKER, Role.RELAY})
_PEOPLE: Final = {Role.USER, Role.OPERATOR}
_READERS: Final = _PEOPLE | {Role.TRAINER, Role.WORKER, Role.RELAY}
_METHODS: Final[dict[str, dict[str, set[Role]]]] = {
    "Runs": {
        "SubmitRun": _PEOPLE | {Role.TRAINER},  # who brings a trainer submits its run, too
        "GetRun": _PEOPLE | {Role.TRAINER},
        "ListRuns": _PEOPLE,
        "CancelRun": _PEOPLE,
        "WatchRun": _PEOPLE | {Role.TRAINER},
        "ReadTimeline": _PEOPLE | {Role.TRAINER},
        "ClaimRun": {Role.TRAINER},
        "RenewLease": {Role.TRAINER},
        "ReleaseLease": {Role.TRAINER},
        "ReserveVersion": {Role.TRAINER},
        "AnnounceVersion": {Role.TRAINER},
        "Report": {Role.TRAINER},
        "FinishRun": {Role.TRAINER},
        "WatchEnded": {Role.RELAY},
    },
    "Rollouts": {
        "Submit": {Role.TRAINER},
        "WatchFinished": {Role.TRAINER},
        "StreamTokens": _PEOPLE | {Role.TRAINER},
        "Acknowledge": {Role.TRAINER},
        "Cancel": {Role.TRAINER},
        "CompleteEpisodes": {Role.TRAINER},
        "WatchTrajectories": {Role.TRAINER},
        "CommitTrajectories": {Role.TRAINER},
    },
    "Fleet": {
        "Control": {Role.WORKER},
        "Append": {Role.WORKER},
        "ListWorkers": _PEOPLE,
        "DrainWorker": {Role.OPERATOR},
    },
    "Weights": {
        "BeginPublish": {Role.TRAINER},
        "PutTiles": {Role.TRAINER},
        "CommitPublish": {Role.TRAINER},
        "GetManifest": _READERS,
        "GetPatch": _READERS,
        "FindWay": _READERS,
        "FetchTiles": _READERS,
        "WatchVersions": _READERS,
        "DescribeVersions": _PEOPLE | {Role.TRAINER},
        "WatchEnded": {Role.RELAY},
    },
    "Grants": {
        "Borrow": {Role.WORKER},
        "WatchGuard": {Role.OPERATOR},
    },
}
#: Full method name, as gRPC has it, to the roles that may call it.
TABLE: Final[dict[str, frozenset[Role]]] = {
    f"/ebbtide.v1.{service}/{method}": frozenset(roles)
    for service, methods in _METHODS.items()
    for method, roles in methods.items()
}
#: Services that everyone may call who is known at all: they tell nothing about runs.
_OPEN: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.")


def is_open(method: str) -> bool:
    return method.startswith(_OPEN)


def permitted(method: str, roles: Iterable[Role]) -> bool:
    """Whether somebody who has one of `roles` may call the method."""
    return is_open(method) or not TABLE.get(method, frozenset()).isdisjoint(roles)


def told(method: str) -> str:
    """The roles that may call a method, for people."""
    return " or ".join(sorted(TABLE.get(method, ()))) or "none"
