"""Decides what a client is told of an error."""

import secrets

from ebbtide.errors import EbbtideError, Internal
from ebbtide.gateway.dialects.dialect import status_of
from ebbtide.gateway.metrics import ERRORS
from ebbtide.telemetry import get_logger

log = get_logger(__name__)


def as_told(error: Exception, request_id: str) -> tuple[EbbtideError, str]:
    """The error as the client may see it, and its outcome for metrics. It is counted. Unexpected ones are logged under
    an id. The error forgets where it was raised: the frames there refer to it, and no collection would free the cycle.
    """
    told = _tellable(error, request_id)
    _forget_frames(error)
    status = status_of(told)
    ERRORS.labels(str(status)).inc()
    return told, "refused" if status < 500 else "failed"


def _tellable(error: Exception, request_id: str) -> EbbtideError:
    if isinstance(error, EbbtideError) and not isinstance(error, Internal):
        return error
    name = secrets.token_hex(4)
    log.error("unexpected error", exc_info=error, error_id=name, request_id=request_id)
    return Internal(f"internal error {name}; look for this id in the gateway's log")


def _forget_frames(error: BaseException) -> None:
    chain: list[BaseException | None] = [error]
    while chain:
        if (one := chain.pop()) is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            chain += one.__cause__, one.__context__
