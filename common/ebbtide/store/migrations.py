"""The layout of what lies in the store, by number, and how an older one becomes the present one.

Schema 1 is what 0.1.0 wrote, which left no stamp: a store with a term and no stamp has it. What only adds (a key, a
field with a default) needs no number; what changes the meaning or place of something that is there takes the next one,
and a step that brings it about.

Invariant: the stamp is never ahead of the data. A step's changes come first, then its stamp, durable before the next
step or any other write; so whoever dies here leaves the older stamp, and the step is done again: each must be
repeatable, also over what is changed already. Nothing is changed before the term is taken, and all under it. A store
that is newer than this program is refused before the term is taken: its coordinator goes on.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from ebbtide.errors import StoreUnavailable
from ebbtide.store.link.store_connection import StoreConnection
from ebbtide.store.lua_scripts import LuaScript
from ebbtide.store.store_keys import INDEX, SCHEMA, TERM, run_key

#: Under the term alone: a coordinator that was superseded amid its steps stamps nothing. Both keys lie in one slot.
_STAMP: Final = LuaScript(
    "stamp",
    "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('TERM ') end\n"
    "redis.call('SET', ARGV[2], ARGV[3])\n"
    "return 1",
)
_UNSTAMPED: Final = 0
#: More than any number of ours has.
_DIGITS: Final = 9
#: What 0.1.0 wrote of each run, and every later coordinator reads.
_RECORD: Final = ("spec", "status", "created", "seq")


class MigrationStep(NamedTuple):
    """From schema `to` - 1 to `to`. `check`, which only reads, comes before the term is taken; `change` behind it, with
    the term that scripts are to check. `change` may be repeated.
    """

    to: int
    what: str
    check: Callable[[StoreConnection], Awaitable[None]] | None = None
    change: Callable[[StoreConnection, str], Awaitable[None]] | None = None


async def _whole_records(link: StoreConnection) -> None:
    """A store without a stamp is 0.1.0's, or has something else that passes for it. Raises `StoreUnavailable`."""
    for run_id in await _runs(link):
        found = await link.call("HMGET", run_key(run_id, "RUN"), *_RECORD)
        lacking = [name for name, value in zip(_RECORD, found, strict=True) if value is None]
        if 0 < len(lacking) < len(_RECORD):  # with all of them: expired, or never made
            raise StoreUnavailable(
                f"the store at {link.where} has no schema, and Ebbtide 0.1.0 did not write run {run_id} there: its "
                f"record lacks {', '.join(lacking)}; end its runs with what wrote it, or name an empty store"
            )


#: In order, one for each schema from 1 on.
STEPS: Final[Sequence[MigrationStep]] = (MigrationStep(1, "stamp what 0.1.0 wrote", check=_whole_records),)


class Schema:
    """`check` before the term is taken, `migrate` behind it and before anything is read. Both raise
    `StoreUnavailable`, `migrate` also `TermSuperseded`.
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
        """Bring the store to the newest schema. Returns what was done; nothing where it is there already."""
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
                f"the store at {self._link.where} has {text!r} for its schema, which is no number of one: name another "
                "store"
            )
        if (found := int(stamp)) > self.newest:
            raise StoreUnavailable(
                f"the store at {self._link.where} has schema {found}, and this coordinator knows none above "
                f"{self.newest}: start one of the release that wrote it, or restore a backup of before that upgrade"
            )
        return found


async def _runs(link: StoreConnection) -> list[str]:
    return [member.decode() for member in await link.call("ZRANGE", INDEX, 0, -1)]
