"""Turns the store's refusals into errors that say what is wrong and what to do."""

from typing import Final

import redis.exceptions

from ebbtide.errors import Draining, Internal, StoreUnavailable
from ebbtide.store.unexpected_data import WritesRefused


class TermSuperseded(Draining):
    """Another coordinator has taken over the store, which now refuses this one's writes: it must end."""

    def __init__(self) -> None:
        super().__init__("another coordinator has taken over this store; this one must stop")


class StoreRefused(Exception):
    """A script's refusal, with its `code` (see `lua/`) and detail. Topics turn it into an error for callers."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code} {detail}")
        self.code, self.detail = code, detail


_REFUSALS: Final = frozenset({
    "NORUN", "ENDED", "LEASE", "TAKEN", "HELD", "UNSETTLED", "LIVE", "UNRESERVED", "OLD", "QUOTA", "QUEUE", "OPEN",
    "UNKNOWN", "TRAJECTORY", "KIND", "GATEWAYS", "SESSION", "OVER", "TURNS", "ROLLOUT", "COUNTED",
    "KNOWN",
})  # fmt: skip
_REMEDIES: Final = {
    "OOM": "is full (maxmemory); raise maxmemory, or let trainers commit and acknowledge so that it empties",
    "MISCONF": "cannot write to its disk; free disk space or mend the volume of its append-only file",
    "READONLY": "is a read-only replica; point the coordinator at the primary",
    "NOAUTH": "needs another user or password; correct them in the store URL",
    "NOPERM": "refuses a command to the user in the store URL; allow this user all commands on keys ebbtide:*",
    "LOADING": "is still loading its data and answers afterwards",
    "BUSY": "is busy with a script and answers afterwards",
    "MASTERDOWN": "has lost its primary",
    "CLUSTERDOWN": "is a cluster that is down",
    "NOREPLICAS": "has fewer replicas than its min-replicas-to-write; start them",
}
#: Redis checks these before a script's first write, so such a script did nothing.
_UNDONE: Final = ("OOM", "MISCONF", "NOREPLICAS")
#: The client library has classes for some codes, and strips these codes from replies.
_CLASSES: Final = (
    (redis.exceptions.OutOfMemoryError, "OOM"),
    (redis.exceptions.ReadOnlyError, "READONLY"),
    (redis.exceptions.NoPermissionError, "NOPERM"),
    (redis.exceptions.AuthenticationError, "NOAUTH"),
    (redis.exceptions.BusyLoadingError, "LOADING"),
    (redis.exceptions.MasterDownError, "MASTERDOWN"),
    (redis.exceptions.ClusterDownError, "CLUSTERDOWN"),
)
#: While it connects, the client library keeps only the text.
_PHRASES: Final = (
    ("Authentication required", "NOAUTH"),
    ("invalid username-password", "NOAUTH"),
    ("loading the dataset", "LOADING"),
)
#: Codes of a server that is no longer or not yet the primary: the connection must find the primary again.
_ESTRANGING: Final = ("READONLY", "MASTERDOWN", "LOADING")


def estranges(error: redis.exceptions.RedisError) -> bool:
    """Whether the error means that the link leads to the wrong server."""
    code = next((name for kind, name in _CLASSES if isinstance(error, kind)), str(error).partition(" ")[0])
    return code in _ESTRANGING or any(f"-{name} " in str(error) for name in _ESTRANGING)


def fault(error: redis.exceptions.RedisError, *, where: str) -> Exception:
    """The exception to raise for an error of the store at `where`."""
    text = str(error)
    code, _, detail = text.partition(" ")
    if code == "TERM":
        return TermSuperseded()
    if code in _REFUSALS:
        return StoreRefused(code, detail)
    code = next((name for kind, name in _CLASSES if isinstance(error, kind)), code)
    code = next((name for phrase, name in _PHRASES if phrase in text), code)
    for name, remedy in _REMEDIES.items():
        if code == name or f"-{name} " in text:  # the latter is raised inside a script
            kind = WritesRefused if name in _UNDONE else StoreUnavailable
            return kind(f"the store at {where} {remedy}")
    if isinstance(error, redis.exceptions.ResponseError):
        return Internal(f"the store at {where} refused a command: {text[:200]}")
    return StoreUnavailable(f"the store at {where} does not answer ({text[:200]}); start it, or correct the store URL")
