"""Maps exceptions to gRPC statuses and back, for servers and clients.

An exception's name, field and retry-after travel as trailing metadata, so that a client raises what the server raised.
Other exceptions than `EbbtideError` stay on the server: the client gets a fixed text and an id that the log has, too.
"""

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

import grpc
from grpc import StatusCode

from ebbtide import errors
from ebbtide.errors import EbbtideError

log = logging.getLogger(__name__)

#: Exception -> status, subclasses included. Read backwards for statuses without an exception's name.
CODES: Final[dict[type[EbbtideError], StatusCode]] = {
    errors.InvalidRequest: StatusCode.INVALID_ARGUMENT,
    errors.NotFound: StatusCode.NOT_FOUND,
    errors.AlreadyExists: StatusCode.ALREADY_EXISTS,
    errors.Unauthenticated: StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: StatusCode.PERMISSION_DENIED,
    errors.Superseded: StatusCode.ABORTED,
    errors.NotReady: StatusCode.FAILED_PRECONDITION,
    errors.NoCapacity: StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: StatusCode.UNAVAILABLE,
    errors.ChunkCorrupt: StatusCode.DATA_LOSS,
    errors.Internal: StatusCode.INTERNAL,
}
_BY_CODE: Final = {code: kind for kind, code in CODES.items()}
_BY_NAME: Final = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, EbbtideError)
}
_ERROR, _FIELD, _RETRY = "ebbtide-error", "ebbtide-field", "retry-after-ms"
#: grpc.aio replaces the server's status by this if a write was under way when the stream ended (grpc/grpc#36066).
_LOST_STATUS: Final = "Internal error from Core"
#: Details travel percent-encoded in a header block of at most 8 KiB.
_MAX_DETAILS: Final = 1000
_MAX_FIELD: Final = 200


class Status(NamedTuple):
    code: StatusCode
    details: str
    metadata: tuple[tuple[str, str], ...]


def to_status(error: Exception) -> Status:
    """The status to send for `error`. An error that callers cannot mend is logged here, under the id that they get."""
    if not isinstance(error, EbbtideError) or isinstance(error, errors.Internal):
        name = secrets.token_hex(4)
        log.error("unexpected error", exc_info=error, extra={"error_id": name})
        error = errors.Internal(f"internal error {name}; look for this id in the service's log")
    code = next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), StatusCode.INTERNAL)
    kind = errors.StoreUnavailable if isinstance(error, errors.StoreUnavailable) else type(error)
    metadata = [(_ERROR, kind.__name__)]
    if isinstance(error, errors.InvalidRequest) and error.field:
        metadata.append((_FIELD, quote(error.field[:_MAX_FIELD], safe="[]")))
    if isinstance(error, errors.NoCapacity):
        metadata.append((_RETRY, str(round(error.retry_after_s * 1000))))
    return Status(code, _shorten(str(error)), tuple(metadata))


def from_rpc_error(error: grpc.aio.AioRpcError, *, service: str = "service", target: str = "") -> EbbtideError:
    """The exception that the server raised. For errors of gRPC itself, one that names the service and `target`."""
    sent = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    text = error.details() or ""
    kind = _BY_NAME.get(sent.get(_ERROR, ""))
    if kind is None:
        return _from_transport(error.code(), text, f"{service} at {target}" if target else service)
    if issubclass(kind, errors.InvalidRequest):
        field = unquote(sent.get(_FIELD, ""))
        return kind(text.removeprefix(f"{field}: "), field=field)  # a status has both, for clients without metadata
    if issubclass(kind, errors.NoCapacity):
        wait = sent.get(_RETRY, "")
        return kind(text, retry_after_s=int(wait) / 1000 if wait.isdecimal() else 1.0)
    return kind(text)


@contextmanager
def translated(service: str, target: str = "") -> Iterator[None]:
    """Raise the result of `from_rpc_error` for an `AioRpcError` inside the block."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, service=service, target=target) from None


def _from_transport(code: StatusCode, text: str, peer: str) -> EbbtideError:
    if code is StatusCode.UNAVAILABLE:
        return errors.Unavailable(f"{peer} cannot be reached ({text}); is it running, with TLS as here?")
    if code is StatusCode.DEADLINE_EXCEEDED:
        return errors.Unavailable(f"{peer} did not answer in time; retry")
    if code in (StatusCode.CANCELLED, StatusCode.OK) or text == _LOST_STATUS:
        return errors.Unavailable(f"{peer} ended the call; retry")
    if code is StatusCode.RESOURCE_EXHAUSTED and ("larger than max" in text or "metadata size" in text):
        return errors.InvalidRequest(f"message too large for {peer} ({text}); send less at a time")
    if code is StatusCode.UNIMPLEMENTED:
        return errors.Internal(f"{peer} does not offer this call; is it an Ebbtide service of the same version?")
    return _BY_CODE.get(code, errors.Internal)(f"{peer}: {text}")


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_DETAILS else text[: _MAX_DETAILS - 1] + "…"
