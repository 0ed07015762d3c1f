"""Defines the exceptions that callers meet. None knows gRPC; `ebbtide.rpc.status_table` maps them to statuses."""


class EbbtideError(Exception):
    """Root of all errors. The text is for the caller: it names the field or service, and the remedy."""


class InvalidRequest(EbbtideError):
    """Fix the call; `field` names what is wrong, and `text` says why."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field, self.text = field, message


class NotFound(EbbtideError):
    """Attach again, or give up."""


class AlreadyExists(EbbtideError):
    """The id belongs to another body: choose another one."""


class Unauthenticated(EbbtideError):
    """The call has no valid token: set one."""


class PermissionDenied(EbbtideError):
    """The token is valid, but not for this call: use one whose role and run permit it."""


class Superseded(EbbtideError):
    """The fence is an old one: stop what it was for."""


class LeaseSuperseded(Superseded):
    """Another holder has the lease: step down."""


class NotReady(EbbtideError):
    """Wait, then retry."""


class VersionUnavailable(NotReady):
    """The policy version is not there yet, or no longer: wait, then retry."""


class NoCapacity(EbbtideError):
    """Wait for `retry_after_s`, then retry."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(NoCapacity):
    """A client's key asks for more than its limits allow: wait for `retry_after_s`, then retry."""


class BudgetSpent(RateLimited):
    """A client's key has used up its tokens. `retry_after_s` 0: there will be no more."""


class Unavailable(EbbtideError):
    """Retry."""


class Draining(Unavailable):
    """The service leaves: retry, elsewhere or later."""


class StandingBy(Unavailable):
    """Another coordinator leads: ask the one whose health says SERVING."""


class StoreUnavailable(Unavailable):
    """The store is out of reach, or full: retry."""


class ChunkCorrupt(EbbtideError):
    """Fetch or send the tile again."""


class Internal(EbbtideError):
    """Report it, with the id that the log has, too."""
