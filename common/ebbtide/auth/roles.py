"""Holds the table of the roles that may call each RPC.

Invariant: it names every RPC of `ebbtide.v1` and no other (a test compares it with the contracts). Callers with a role
may not call what it does not name. It does not change while a process runs.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from ebbtide.types.run import GATEWAY, ROLES


class Role(StrEnum):
    """The role of a token's or certificate's holder."""

    USER = "user"
    OPERATOR = "operator"
    TRAINER = "trainer"  # and the episode driver
    GATEWAY = "gateway"
    WORKER = "worker"
    RELAY = "relay"
    AGENT = "agent"  # asks gateways for text, and may call no service
    COORDINATOR = "coordinator"  # this and the guard serve and call nobody: only certificates have these roles
    GUARD = "guard"


#: Roles whose tokens may be bound to one run: the others work for the whole fleet.
OF_ONE_RUN: Final = frozenset({Role.USER, Role.TRAINER, Role.GATEWAY, Role.AGENT})
#: Roles whose tokens may be shown to a worker that serves its peers: they permit no more than its own.
AMONG_PEERS: Final = frozenset({Role.WORKER, Role.RELAY})
_PEOPLE: Final = {Role.USER, Role.OPERATOR}
_HOLDERS: Final = {Role.TRAINER, Role.GATEWAY}  # of leases
_READERS: Final = _PEOPLE | {Role.TRAINER, Role.WORKER, Role.RELAY}
_METHODS: Final[dict[str, dict[str, set[Role]]]] = {
    "Runs": {
        "SubmitRun": _PEOPLE | {Role.TRAINER},  # an external trainer submits its own run
        "GetRun": _PEOPLE | _HOLDERS,
        "ListRuns": _PEOPLE | {Role.GATEWAY},
        "CancelRun": _PEOPLE,
        "WatchRun": _PEOPLE | _HOLDERS,
        "ReadTimeline": _PEOPLE | {Role.TRAINER},
        "ClaimRun": _HOLDERS,  # the lease's role must be theirs: see `may_claim`
        "RenewLease": _HOLDERS,
        "ReleaseLease": _HOLDERS,
        "ReserveVersion": {Role.TRAINER},
        "AnnounceVersion": {Role.TRAINER},
        "ReadWorkLeft": {Role.TRAINER},
        "ReleaseWorker": {Role.TRAINER},
        "Report": {Role.TRAINER},
        "FinishRun": {Role.TRAINER},
        "WatchEnded": {Role.RELAY},
    },
    "Rollouts": {
        "Submit": _HOLDERS,
        "WatchFinished": {Role.TRAINER},
        "StreamTokens": _PEOPLE | _HOLDERS,
        "Acknowledge": {Role.TRAINER},
        "ListKeyUsage": _PEOPLE | {Role.GATEWAY},
        "Cancel": _HOLDERS,
        "CompleteEpisodes": {Role.TRAINER},
        "WatchTrajectories": _PEOPLE | {Role.TRAINER},
        "CommitTrajectories": {Role.TRAINER},
    },
    "Sessions": {
        "OpenSession": {Role.GATEWAY},
        "AddTurn": {Role.GATEWAY},
        "ReadTurns": _HOLDERS,
        "EndSession": {Role.GATEWAY},
        "ListSessions": _HOLDERS,
        "WatchUnverified": {Role.TRAINER},
        "PostVerdict": {Role.TRAINER},
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
    "Loans": {
        "Own": {Role.TRAINER},
        "WatchDevice": {Role.OPERATOR},
    },
}
#: Full method name in gRPC -> the roles that may call it.
TABLE: Final[dict[str, frozenset[Role]]] = {
    f"/ebbtide.v1.{service}/{method}": frozenset(roles)
    for service, methods in _METHODS.items()
    for method, roles in methods.items()
}
#: Role -> the roles of leases that it may claim.
_LEASES: Final = {Role.TRAINER: ROLES, Role.GATEWAY: (GATEWAY,)}
#: Every authenticated caller may call these services: they say nothing about runs.
_OPEN: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.")


def is_open(method: str) -> bool:
    return method.startswith(_OPEN)


def permitted(method: str, roles: Iterable[Role]) -> bool:
    """Whether one of `roles` may call the method."""
    return is_open(method) or not TABLE.get(method, frozenset()).isdisjoint(roles)


def may_claim(lease_role: str, roles: Iterable[Role]) -> bool:
    """Whether one of `roles` may claim a lease of this role."""
    return any(lease_role in _LEASES.get(role, ()) for role in roles)


def told(method: str) -> str:
    """The roles that may call a method, for people."""
    return " or ".join(sorted(TABLE.get(method, ()))) or "none"
