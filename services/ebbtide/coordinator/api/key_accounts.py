"""Holds clients' keys to their limits: reads a key's account, has the decision made, and says what a submit charges.

Invariant: a run's submits come one at a time under its lock, and other scripts only lower what an account has reserved.
So nothing that was decided here is wrong by the time at which the submit is stored. Accounts are in the store alone.
"""

from collections.abc import Sequence
from typing import Final

from ebbtide.coordinator.api.key_admission import KeyCharge, KeyEntry, admit_charge
from ebbtide.errors import BudgetSpent, InvalidRequest, NoCapacity, RateLimited
from ebbtide.store.rollout_rows import AccountCharge
from ebbtide.store.store import Store
from ebbtide.store.topics.account_topic import ReadAccount
from ebbtide.types.ids import check_id
from ebbtide.types.key_usage import KeyUsage, MeteredKey
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import LeaseRef, is_gateway
from ebbtide.types.session import SessionTurn

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
