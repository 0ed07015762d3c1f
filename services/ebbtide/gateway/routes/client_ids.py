"""Reads the ids by which a client can come back: of its request, and of its session."""

from collections.abc import Mapping

import msgspec
from starlette.datastructures import Headers

from ebbtide.errors import InvalidRequest
from ebbtide.gateway.request import TextRequest
from ebbtide.types.ids import check_client_id, check_session_name

REQUEST_ID = "x-request-id"
SESSION_ID = "x-session-id"
GROUP_ID = "x-group-id"


def with_ids(
    request: TextRequest, headers: Headers, path: Mapping[str, str], request_id_header: str = REQUEST_ID
) -> TextRequest:
    """The request with the ids of its headers and its path, which count before those of its body."""
    request_id = headers.get(request_id_header, "") or request.request_id
    session_id = path.get("session_id", "") or headers.get(SESSION_ID, "") or request.session_id
    return msgspec.structs.replace(
        request,
        request_id=check_client_id(request_id, field="X-Request-ID"),
        session_id=check_session_name(session_id, field="X-Session-ID"),
        group_id=check_client_id(_group(headers, session_id), field="X-Group-ID"),
    )


def _group(headers: Headers, session_id: str) -> str:
    group_id = headers.get(GROUP_ID, "")
    if group_id and not session_id:
        raise InvalidRequest("is of a session; name the session by X-Session-ID, too", field="X-Group-ID")
    return group_id
