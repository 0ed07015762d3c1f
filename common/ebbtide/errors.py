"""The exceptions that callers may meet. None of them knows gRPC; `ebbtide.rpc.status_table` maps them to statuses.

EbbtideError
├── InvalidRequest        fix the call; names the field
├── NotFound              re-register, or give up
├── AlreadyExists         the id is taken by another body
├── Unauthenticated       no valid token
├── PermissionDenied      a valid token, but not for this
├── Superseded            an old fence
│   ├── AttemptSuperseded     drop the attempt
│   └── LeaseSuperseded       step down
├── NotReady              wait, then retry
│   ├── VersionUnavailable    the policy version is not there (yet, or any more)
│   └── TooStale              no weights new enough
├── NoCapacity            back off for `retry_after_s`
├── Unavailable           retry
│   ├── Draining              the service is leaving
│   ├── StandingBy            another coordinator leads
│   └── StoreUnavailable      the store is gone or full
├── ChunkCorrupt          fetch again
└── Internal              report, with the id that the log bears
"""


class EbbtideError(Exception):
    """Root of the tree. The text is written for the caller: it names the field or service, and the remedy."""


class InvalidRequest(EbbtideError):
    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field and not message.startswith(f"{field}:") else message)
        self.field = field


class NotFound(EbbtideError):
    pass


class AlreadyExists(EbbtideError):
    pass


class Unauthenticated(EbbtideError):
    pass


class PermissionDenied(EbbtideError):
    pass


class Superseded(EbbtideError):
    pass


class AttemptSuperseded(Superseded):
    pass


class LeaseSuperseded(Superseded):
    pass


class NotReady(EbbtideError):
    pass


class VersionUnavailable(NotReady):
    pass


class TooStale(NotReady):
    pass


class NoCapacity(EbbtideError):
    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(EbbtideError):
    pass


class Draining(Unavailable):
    pass


class StandingBy(Unavailable):
    pass


class StoreUnavailable(Unavailable):
    pass


class ChunkCorrupt(EbbtideError):
    pass


class Internal(EbbtideError):
    pass
