"""Decides what a client is told of an error."""

import secrets

from ebbtide.errors import EbbtideError, Internal
from ebbtide.gateway.dialects.error_shapes import status_of
from ebbtide.telemetry import get_logger

log = get_logger(__name__)


def as_told(error: Exception, request_id: str) -> tuple[EbbtideError, str]:
    """The error as the client may see it, and its outcome for metrics. Unexpected ones are logged under an id."""
    if isinstance(error, EbbtideError) and not isinstance(error, Internal):
        return error, "refused" if status_of(error) < 500 else "failed"
    name = secrets.token_hex(4)
    log.error("unexpected error", exc_info=error, error_id=name, request_id=request_id)
    return Internal(f"internal error {name}; look for this id in the gateway's log"), "failed"
