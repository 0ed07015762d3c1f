"""Reads the accounts of clients' keys. The scripts of submits charge them, those of requests' ends settle them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

from ebbtide.store.record_codec import text_pairs
from ebbtide.store.store_keys import run_key
from ebbtide.store.topics.topic import Topic
from ebbtide.types.key_usage import KeyBalance, KeyUsage
from ebbtide.types.run import LeaseRef

_KNOWN, _NEW_REQUEST = 0, 2
_DAY_S: Final = 86400
#: What `_usage` tells of an account.
_TOLD: Final = ("requests", "open", "spent", "today", "day", "reserved")


class ReadAccount(NamedTuple):
    """An account, and which rollouts are new to it."""

    balance: KeyBalance
    until_midnight_s: float
    accounts: int  # of the run, this one included if it is there
    exists: bool
    new: list[bool]  # of each rollout: it was not submitted before
    opens: list[bool]  # of each rollout: no other of its request is open


class AccountTopic(Topic):
    async def read(
        self, lease: LeaseRef, owner: str, rollouts: Sequence[tuple[str, str]], session_id: str = ""
    ) -> ReadAccount:
        """The account of an owner, for rollouts as (id, group). `session_id`: of which their groups are turns, perhaps
        stored ones; a stored turn's rollouts are not new. "": they are no turns.
        """
        flat = [part for rollout in rollouts for part in rollout]
        found = [int(one) for one in await self._leased("read_account", lease, owner, session_id, *flat)]
        spent, today, reserved, opened, request_debt, token_debt, idle_ms, left_s, exists, accounts, *states = found
        balance = KeyBalance(
            spent=spent,
            today=today,
            reserved=reserved,
            open=opened,
            request_debt=request_debt,
            token_debt=token_debt,
            idle_ms=idle_ms,
        )
        new, opens = [one != _KNOWN for one in states], [one == _NEW_REQUEST for one in states]
        return ReadAccount(balance, float(left_s), accounts, bool(exists), new, opens)

    async def usage(self, run_id: str, owner: str = "") -> list[KeyUsage]:
        """What keys have used of a run, by their owners. `owner`: "" for all."""
        key = run_key(run_id, "ACCOUNTS")
        fields = await self._of_owner(key, owner) if owner else await self._of_all(key)
        day = int((await self._link.call("TIME"))[0]) // _DAY_S
        return [_usage(one, found, day) for one, found in sorted(fields.items())]

    async def _of_owner(self, key: str, owner: str) -> dict[str, dict[str, int]]:
        values = await self._link.call("HMGET", key, *(f"{owner}:{name}" for name in _TOLD))
        found = {name: int(value) for name, value in zip(_TOLD, values, strict=True) if value is not None}
        return {owner: found} if found else {}

    async def _of_all(self, key: str) -> dict[str, dict[str, int]]:
        fields = defaultdict[str, dict[str, int]](dict)
        for name, value in text_pairs(await self._link.call("HGETALL", key)):
            whose, _, what = name.partition(":")
            if what and whose:
                fields[whose][what] = int(value)
        return fields


def _usage(owner: str, found: dict[str, int], day: int) -> KeyUsage:
    return KeyUsage(
        owner=owner,
        requests=found.get("requests", 0),
        requests_open=found.get("open", 0),
        tokens=found.get("spent", 0),
        tokens_today=found.get("today", 0) if found.get("day", 0) == day else 0,
        tokens_reserved=found.get("reserved", 0),
    )
