"""Maps errors to HTTP statuses, and shapes them as each kind of client expects."""

from collections.abc import Callable
from typing import Any, Final

from ebbtide import errors
from ebbtide.errors import EbbtideError

#: Exception -> status, subclasses included. The first that fits counts.
_STATUSES: Final[tuple[tuple[type[EbbtideError], int], ...]] = (
    (errors.InvalidRequest, 400),
    (errors.Unauthenticated, 401),
    (errors.PermissionDenied, 403),
    (errors.NotFound, 404),
    (errors.AlreadyExists, 409),
    (errors.VersionUnavailable, 409),
    (errors.NoCapacity, 429),
    (errors.NotReady, 503),
    (errors.Superseded, 503),
    (errors.Unavailable, 503),
)
ErrorShape = Callable[[int, EbbtideError, str], dict[str, Any]]
_OPENAI_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
#: As OpenAI's own service names a budget that is used up; clients do not try again.
_SPENT: Final = "insufficient_quota"
#: Other errors have their status as a number.
_OPENAI_CODES: Final[dict[type[EbbtideError], str]] = {
    errors.BudgetSpent: _SPENT,
    errors.RateLimited: "rate_limit_exceeded",
}
_ANTHROPIC_TYPES: Final = _OPENAI_TYPES | {
    409: "invalid_request_error",
    413: "request_too_large",
    503: "overloaded_error",
}
#: When a client that was told to come back may do so.
RETRY_AFTER_S: Final = 1.0


class BodyTooLarge(errors.InvalidRequest):
    """Send less."""


def status_of(error: EbbtideError) -> int:
    if isinstance(error, BodyTooLarge):
        return 413
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def retry_after_s(error: EbbtideError) -> float | None:
    """Seconds after which the same request may succeed; None: it will not."""
    if isinstance(error, errors.NoCapacity):
        return error.retry_after_s or None
    retryable = status_of(error) == 503 or isinstance(error, errors.VersionUnavailable)
    return RETRY_AFTER_S if retryable else None


def openai_error(status: int, error: EbbtideError, request_id: str) -> dict[str, Any]:
    """As `openai` clients read it."""
    field = error.field if isinstance(error, errors.InvalidRequest) else ""
    kind, code = _OPENAI_TYPES.get(status, "internal_error"), _OPENAI_CODES.get(type(error), status)
    if isinstance(error, errors.BudgetSpent):
        kind = _SPENT
    return {
        "error": {"message": str(error), "type": kind, "param": field or None, "code": code},
        "request_id": request_id,
    }


def anthropic_error(status: int, error: EbbtideError, request_id: str) -> dict[str, Any]:
    """As `anthropic` clients read it."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}
