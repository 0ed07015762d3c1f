"""Checks and makes ids, bounds the texts that services store and list, and cuts longer ones."""

import hashlib
import re
import secrets
from typing import Final

from ebbtide.errors import InvalidRequest

#: Characters of an id.
MAX_ID = 128
#: Characters of the id that a gateway's client gives a request, a session or a group. It is hashed before it travels.
MAX_CLIENT_ID = 256
_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_ID}}}")


def check_id(value: str, *, field: str) -> str:
    """Return `value` if it is an id; otherwise raise `InvalidRequest` naming `field`."""
    if not _ID.fullmatch(value) or value.strip(".") == "":
        raise InvalidRequest("must be 1 to 128 of A-Z a-z 0-9 . _ - and not only dots", field=field)
    return value


def check_client_id(value: str, *, field: str) -> str:
    """Return `value` if a header could carry it back; otherwise raise `InvalidRequest` naming `field`."""
    if len(value) > MAX_CLIENT_ID or not value.isascii() or not value.isprintable():
        raise InvalidRequest(f"must be at most {MAX_CLIENT_ID} printable ASCII characters", field=field)
    return value


def check_session_name(value: str, *, field: str) -> str:
    """`check_client_id`, for one that also stands in paths: servers tell no escaped slash from one that parts."""
    if "/" in value:
        raise InvalidRequest("must have no slash, as it stands in paths", field=field)
    return check_client_id(value, field=field)


def new_fence() -> str:
    """A new attempt id, lease fence or coordinator term. Random, so a lost write cannot lead to the same one twice."""
    return secrets.token_hex(8)


def rollout_id_of_request(run_id: str, owner: str, session_id: str, request_id: str, completion: int) -> str:
    """The rollout of a completion of a gateway's request, from 0 on. Whoever submits the request again, the id is the
    same. `session_id`: "" for a request of no session. The texts may be any.
    """
    parts = (run_id, owner, session_id, request_id)
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:  # each behind its length: no two requests join to the same bytes
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return f"q-{digest.hexdigest()}-{completion}"


def new_run_id(name: str) -> str:
    return f"{name}-{secrets.token_hex(3)}"


#: Bytes of a reason: why a worker leaves or failed, why a run ended.
MAX_REASON_BYTES: Final = 1 << 10
#: Bytes of an event: each one is kept until every watcher has read it.
MAX_EVENT_BYTES: Final = 32 << 10
_MORE: Final = " ..."


def shortened(text: str, most: int = MAX_REASON_BYTES) -> str:
    """`text` in at most `most` bytes of UTF-8. A text that was cut ends with an ellipsis."""
    if len(text) * 4 <= most or len(data := text.encode()) <= most:
        return text
    return data[: most - len(_MORE)].decode(errors="ignore") + _MORE
