"""Numbers the layouts of the store's data (schemas), and migrates an older one to the present one.

Schema 1 is the first layout, that of a store without a stamp, too: it is empty, or forgot. Additions (a key, a field
with a default) need no number. A change of the meaning or place of stored data takes the next number, and a step.

Invariant: the stamp is never ahead of the data. A step changes the data first; then its stamp becomes durable before
the next step or any other write. If a coordinator dies here, the next one repeats the step: every step must be safe to
repeat over changed data. All changes happen under the term. A store with a newer schema is refused before the term is
taken, so its coordinator goes on.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from ebbtide.errors import StoreUnavailable
from ebbtide.store.link.store_connection import StoreConnection
from ebbtide.store.lua_scripts import LuaScript
from ebbtide.store.store_keys import INDEX, SCHEMA, TERM, run_key

#: Checks the term: a coordinator that was superseded between steps stamps nothing. Both keys lie in one slot.
_STAMP: Final = LuaScript(
    "stamp",
    "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('TERM ') end\n"
    "redis.call('SET', ARGV[2], ARGV[3])\n"
    "return 1",
)
_UNSTAMPED: Final = 0
#: More digits than any schema number has.
_DIGITS: Final = 9
#: Fields that each run has.
_RECORD: Final = ("spec", "status", "created", "seq")


class MigrationStep(NamedTuple):
    """Migrates from schema `to` - 1 to `to`."""

    to: int
    what: str  # for logs
    check: Callable[[StoreConnection], Awaitable[None]] | None = None  # reads only; runs before the term is taken
    change: Callable[[StoreConnection, str], Awaitable[None]] | None = None  # with the term; safe to repeat


async def _whole_records(link: StoreConnection) -> None:
    """Raise `StoreUnavailable` if a store without a stamp holds runs that Ebbtide did not write."""
    for run_id in await _runs(link):
        found = await link.call("HMGET", run_key(run_id, "RUN"), *_RECORD)
        lacking = [name for name, value in zip(_RECORD, found, strict=True) if value is None]
        if 0 < len(lacking) < len(_RECORD):  # a run without any of them has expired
            raise StoreUnavailable(
                f"the store at {link.where} has no schema, and Ebbtide did not write run {run_id} there: its record "
                f"lacks {', '.join(lacking)}; end its runs with what wrote it, or name an empty store"
            )


#: One step for each schema, from 1 on.
STEPS: Final[Sequence[MigrationStep]] = (MigrationStep(1, "stamp a store without a schema", check=_whole_records),)


class Schema:
    """Checks and migrates one store. Call `check` before the term is taken, `migrate` after that and before any read.

    Both raise `StoreUnavailable`, `migrate` also `TermSuperseded`.
    """

    def __init__(self, link: StoreConnection, term: str, steps: Sequence[MigrationStep] = STEPS) -> None:
        self._link, self._term, self._steps = link, term, steps
        self.newest = steps[-1].to

    async def check(self) -> None:
        """Refuse a store that this program cannot read or bring up to date."""
        for step in self._steps[await self._found() :]:
            if step.check is not None:
                await step.check(self._link)

    async def migrate(self) -> list[str]:
        """Migrate the store to the newest schema. Returns the names of the steps done."""
        found = await self._found()
        for step in self._steps[found:]:
            if step.change is not None:
                await step.change(self._link, self._term)
            await self._link.run(_STAMP, TERM, self._term, SCHEMA, step.to)
            await self._link.durable()
        return [step.what for step in self._steps[found:]]

    async def _found(self) -> int:
        stamp = await self._link.call("GET", SCHEMA)
        if stamp is None:
            return _UNSTAMPED
        if not stamp.isdigit() or len(stamp) > _DIGITS:
            text = stamp[:40].decode(errors="replace")
            raise StoreUnavailable(
                f"the store at {self._link.where} has {text!r} as its schema, which is no number: name another store"
            )
        if (found := int(stamp)) > self.newest:
            raise StoreUnavailable(
                f"the store at {self._link.where} has schema {found}, and this coordinator knows none above "
                f"{self.newest}: start one of the release that wrote it, or restore a backup from before that upgrade"
            )
        return found


async def _runs(link: StoreConnection) -> list[str]:
    return [member.decode() for member in await link.call("ZRANGE", INDEX, 0, -1)]
