"""Checks and makes ids."""

import re
import secrets

from ebbtide.errors import InvalidRequest

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_id(value: str, *, field: str) -> str:
    """Return `value` if it is an id; otherwise raise `InvalidRequest` naming `field`."""
    if not _ID.fullmatch(value) or value.strip(".") == "":
        raise InvalidRequest("must be 1 to 128 of A-Z a-z 0-9 . _ - and not only dots", field=field)
    return value


def new_fence() -> str:
    """A new attempt id, lease fence or coordinator term. Random, so a lost write cannot lead to the same one twice."""
    return secrets.token_hex(8)


def new_run_id(name: str) -> str:
    return f"{name}-{secrets.token_hex(3)}"
