"""Ids: what they may look like, and how new ones are made."""

import re
import secrets

from ebbtide.errors import InvalidRequest

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_id(value: str, *, field: str) -> str:
    """Return `value` if it is an id; raise `InvalidRequest` naming `field` otherwise."""
    if not _ID.fullmatch(value) or value.strip(".") == "":
        raise InvalidRequest("must be 1 to 128 of A-Z a-z 0-9 . _ - and not only dots", field=field)
    return value


def new_fence() -> str:
    """A fence (attempt id, lease fence, coordinator term): random, so that a lost write can never hand it out twice."""
    return secrets.token_hex(8)


def new_run_id(name: str) -> str:
    return f"{name}-{secrets.token_hex(3)}"
