"""Decides whether a key's request is within the key's limits.

A request reserves the most tokens that it can come to, and gives back at its end what it did not make. So what was
spent never exceeds a budget, however many gateways take requests at once. Rates are leaky buckets (generic cell rate
algorithm, ITU-T I.371): what was taken is a debt that the rate pays off. A minute's worth may be taken at once. A
request of more than that has to wait until there is no debt, and all after it wait longer.
"""

from typing import Final

from msgspec import Struct

from ebbtide.errors import BudgetSpent, RateLimited
from ebbtide.types.key_usage import KeyBalance, KeyLimits

#: Debts are counted in thousandths, so that short times pay off something, too.
_PARTS: Final = 1000
_MINUTE_MS: Final = 60_000
#: When a place or a reservation of an open request may come free.
_SOON_S: Final = 1.0


class KeyCharge(Struct, frozen=True, kw_only=True):
    """What a request would add."""

    requests: int
    tokens: int  # at most


class KeyEntry(Struct, frozen=True, kw_only=True):
    """What is added to the stored debts. Others may add to them meanwhile."""

    request_debt: int
    token_debt: int


def admit_charge(limits: KeyLimits, balance: KeyBalance, charge: KeyCharge, *, until_midnight_s: float) -> KeyEntry:
    """What a request adds to its key's debts. Raises `RateLimited`, or `BudgetSpent` if the tokens are used up."""
    _check_at_once(limits, balance, charge)
    _check_budget("tokens", limits.tokens, balance.spent, balance.reserved, charge.tokens, again_s=0.0)
    _check_budget(
        "tokens of a day",
        limits.tokens_per_day,
        balance.today,
        balance.reserved,
        charge.tokens,
        again_s=until_midnight_s,
    )
    requests = _owed(limits.requests_per_minute, balance.request_debt, balance.idle_ms)
    tokens = _owed(limits.tokens_per_minute, balance.token_debt, balance.idle_ms)
    _check_rate("requests", limits.requests_per_minute, requests, charge.requests)
    _check_rate("tokens", limits.tokens_per_minute, tokens, charge.tokens)
    return KeyEntry(
        request_debt=_next_debt(limits.requests_per_minute, requests, charge.requests) - balance.request_debt,
        token_debt=_next_debt(limits.tokens_per_minute, tokens, charge.tokens) - balance.token_debt,
    )


def _check_at_once(limits: KeyLimits, balance: KeyBalance, charge: KeyCharge) -> None:
    most = limits.requests_at_once
    if most and charge.requests and balance.open + charge.requests > most:
        raise RateLimited(f"it may have {most} requests at once; wait for some", retry_after_s=_SOON_S)


def _check_budget(what: str, most: int, spent: int, reserved: int, asked: int, *, again_s: float) -> None:
    """`again_s`: when more is there; 0: never."""
    if not most or spent + reserved + asked <= most or not asked:
        return
    if spent + asked <= most:
        text = f"requests under way may take the rest of its {most} {what}; wait for some, or ask for fewer max_tokens"
        raise RateLimited(text, retry_after_s=_SOON_S)
    text = f"it has used {spent} of its {most} {what}, and this request may take {asked}"
    raise BudgetSpent(f"{text}; ask for fewer max_tokens, or for another key", retry_after_s=again_s)


def _owed(per_minute: int, debt: int, idle_ms: int) -> int:
    """What is left of a debt after a time."""
    return max(0, debt - per_minute * _PARTS * max(0, idle_ms) // _MINUTE_MS) if per_minute else 0


def _check_rate(what: str, per_minute: int, owed: int, asked: int) -> None:
    over = owed + (asked - per_minute) * _PARTS
    if per_minute and asked and owed and over > 0:
        wait_s = min(over, owed) * _MINUTE_MS / (per_minute * _PARTS) / 1000
        raise RateLimited(f"it may ask for {per_minute} {what} a minute; slow down", retry_after_s=wait_s)


def _next_debt(per_minute: int, owed: int, asked: int) -> int:
    return owed + asked * _PARTS if per_minute else 0
