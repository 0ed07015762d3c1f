"""Defines what a client's key may use of one run, and what it has used."""

from typing import Annotated

from msgspec import Meta, Struct

from ebbtide.types.ids import MAX_ID

#: Lua counts exactly up to 2^53, also thousandths of it.
Limit = Annotated[int, Meta(ge=0, le=1 << 42)]


class KeyLimits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bounds of one key; 0: none. A completion's tokens are those of its response; its prompt counts once a request."""

    requests_per_minute: Limit = 0
    tokens_per_minute: Limit = 0
    tokens: Limit = 0  # in all
    tokens_per_day: Limit = 0  # from midnight to midnight, UTC
    requests_at_once: Limit = 0


class MeteredKey(Struct, frozen=True, kw_only=True):
    """A key whose requests are counted. Keys of one owner have one account in each run."""

    owner: Annotated[str, Meta(min_length=1, max_length=MAX_ID)]
    limits: KeyLimits = KeyLimits()


class KeyUsage(Struct, frozen=True, kw_only=True):
    """What one owner's keys with limits have used of a run."""

    owner: str
    requests: int = 0
    requests_open: int = 0
    tokens: int = 0  # of requests that have ended
    tokens_today: int = 0  # of `tokens`, since midnight, UTC
    tokens_reserved: int = 0  # that open requests may come to, at most


class KeyBalance(Struct, frozen=True, kw_only=True):
    """The account of one owner in one run, as it is stored. Debts are thousandths; negative ones are none."""

    spent: int = 0  # tokens of requests that have ended
    today: int = 0  # of them since midnight
    reserved: int = 0  # tokens that open requests may come to
    open: int = 0  # requests
    request_debt: int = 0
    token_debt: int = 0
    idle_ms: int = 0  # since the debts were written
