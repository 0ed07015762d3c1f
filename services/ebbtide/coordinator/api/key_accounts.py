"""Holds clients' keys to their limits: reads a key's account, has the decision made, and says what a submit charges.

Invariant: a run's submits come one at a time under its lock, and other scripts only lower what an account has reserved.
So nothing that was decided here is wrong by the time at which the submit is stored. Accounts are in the store alone.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from ebbtide.errors import BudgetSpent, InvalidRequest, NoCapacity, RateLimited
from ebbtide.store.records import AccountCharge
from ebbtide.store.sessions import ReadAccount
from ebbtide.store.store import Store
from ebbtide.types.ids import check_id
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import LeaseRef, is_gateway
from ebbtide.types.session import KeyBalance, KeyLimits, KeyUsage, MeteredKey, SessionTurn

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
    """What a request adds to its key's debts. Raises `RateLimited`, or `BudgetSpent` if the tokens are used up.

    A request reserves the most tokens that it can come to, and gives back at its end what it did not make. So what was
    spent never exceeds a budget, however many gateways take requests at once. Rates are leaky buckets (generic cell
    rate algorithm, ITU-T I.371): what was taken is a debt that the rate pays off. A minute's worth may be taken at
    once. A request of more than that has to wait until there is no debt, and all after it wait longer.
    """
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


#: Owners with an account in one run. A list of all fits into a message.
_MOST_ACCOUNTS: Final = 10_000
_RETRY_AFTER_S: Final = 30.0


class KeyAccounts:
    """All methods raise `StoreUnavailable`, `NotFound` and `LeaseSuperseded`."""

    def __init__(self, store: Store) -> None:
        self._accounts = store.accounts

    async def charge(self, lease: LeaseRef, key: MeteredKey, requests: Sequence[RolloutRequest]) -> AccountCharge:
        """What a submit of these rollouts charges. Known ones cost nothing. Raises `RateLimited`, `BudgetSpent`. Call
        with the run's lock held.
        """
        _check_key(lease, key)
        held = _reservations(requests)
        found = await self._accounts.read(lease, key.owner, [(one.rollout_id, one.group_id) for one in requests])
        asked = KeyCharge(
            requests=len({one.group_id for one, opens in zip(requests, found.opens, strict=True) if opens}),
            tokens=sum(most for (_, most), new in zip(held, found.new, strict=True) if new),
        )
        entry = self._admitted(lease, key, found, asked)
        rate = key.limits.tokens_per_minute
        return AccountCharge(key.owner, entry.request_debt, entry.token_debt, rate, held)

    async def check_turn(
        self, lease: LeaseRef, key: MeteredKey, session_id: str, turn: SessionTurn, tokens: int
    ) -> None:
        """Raise what `charge` would raise now for the rollouts of a turn, unless the turn is stored already. A turn
        that is refused here is not stored. This reserves nothing: of turns that come at once, one may be stored whose
        submit is refused. A repeat of its request is submitted as soon as the key has room.
        """
        _check_key(lease, key)
        rollouts = [(one, turn.request_id) for one in turn.rollout_ids]
        found = await self._accounts.read(lease, key.owner, rollouts, session_id)
        if any(found.new):
            self._admitted(lease, key, found, KeyCharge(requests=int(any(found.opens)), tokens=tokens))

    async def usage(self, run_id: str, owner: str) -> list[KeyUsage]:
        """What clients' keys with limits have used of a run."""
        return await self._accounts.usage(check_id(run_id, field="run_id"), owner)

    def _admitted(self, lease: LeaseRef, key: MeteredKey, found: ReadAccount, asked: KeyCharge) -> KeyEntry:
        if any(found.new) and not found.exists and found.accounts >= _MOST_ACCOUNTS:
            text = f"run {lease.run_id} has {found.accounts} keys with limits, and takes no more; use fewer names"
            raise NoCapacity(text, retry_after_s=_RETRY_AFTER_S)
        try:
            return admit_charge(key.limits, found.balance, asked, until_midnight_s=found.until_midnight_s)
        except RateLimited as error:
            kind = BudgetSpent if isinstance(error, BudgetSpent) else RateLimited
            text = f"the key of {key.owner} is at a limit on run {lease.run_id}: {error}"
            raise kind(text, retry_after_s=error.retry_after_s) from None


def _check_key(lease: LeaseRef, key: MeteredKey) -> None:
    check_id(key.owner, field="key.owner")
    if not is_gateway(lease.role):
        raise InvalidRequest("only a gateway's lease has clients with keys; leave it out", field="key")


def _reservations(requests: Sequence[RolloutRequest]) -> list[tuple[int, int]]:
    """Of each rollout, the tokens of its prompt, and the most that it may come to. Completions of one prompt that
    follow each other count it once.
    """
    made, before = list[tuple[int, int]](), b""
    for request in requests:
        prompt = 0 if request.prompt_ids == before else len(request.prompt_ids) // 4
        made.append((prompt, prompt + request.sampling.max_tokens))
        before = request.prompt_ids
    return made
