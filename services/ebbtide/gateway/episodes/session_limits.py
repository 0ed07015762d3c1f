"""Declares the bounds on sessions."""

from typing import Annotated

from msgspec import Meta, Struct

from ebbtide.types.session import MAX_TURNS


class SessionLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on the sessions of one key. A session that is full can be ended, and goes on no more."""

    turns: Annotated[int, Meta(ge=1, le=MAX_TURNS, description="turns of one session")] = 1024
    per_key: Annotated[int, Meta(ge=1, description="open sessions of one key in one run")] = 10_000
    session_bytes: Annotated[
        int, Meta(ge=1 << 16, description="bytes that one session takes here: 16 a sampled token, 4 KiB a turn")
    ] = 64 << 20
    shelf_bytes: Annotated[
        int, Meta(ge=1 << 20, description="bytes of sessions to keep in memory; others are read again")
    ] = 256 << 20
