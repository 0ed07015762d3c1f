"""Counts and logs the relay's refusals of what publishers send."""

import contextlib
from collections.abc import Iterator

from ebbtide import telemetry
from ebbtide.errors import AlreadyExists, ChunkCorrupt, EbbtideError, InvalidRequest, NoCapacity, PermissionDenied
from ebbtide.weight_relay import metrics

_REASONS: dict[type[EbbtideError], str] = {
    InvalidRequest: "malformed",
    ChunkCorrupt: "digest",
    PermissionDenied: "signature",
    AlreadyExists: "conflict",
    NoCapacity: "capacity",
}
log = telemetry.get_logger(__name__)


@contextlib.contextmanager
def refusals(what: str, peer: str) -> Iterator[None]:
    """Count and log the errors that pass here. `peer` sent `what`."""
    try:
        yield
    except EbbtideError as error:
        if reason := _REASONS.get(type(error)):
            count(reason, what=what, peer=peer, error=str(error))
        raise


def count(reason: str, **facts: object) -> None:
    """Count and log one refusal."""
    metrics.REFUSALS.labels(reason).inc()
    log.warning("refused", reason=reason, **facts)
