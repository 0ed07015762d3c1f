"""Shares small notes between the ranks over the store where they meet, beside their orders.

Invariant: notes die with the store, which is rank 0's or torchrun's. Ranks that torchrun restarts do not see the notes
of those before them. A wait has a connection of its own, so it delays no other call.
"""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ebbtide.errors import Unavailable
from ebbtide.runtime import Aside

#: Longest time of a call that need not wait for a note.
_CALL: Final = timedelta(seconds=30)
#: How often a wait looks for its note.
_LOOK_S: Final = 0.01


class RankBoard:
    """The notes, by name, of the ranks that torch's environment variables name. Every rank may make one at any time.

    Its calls raise `Unavailable` once the store is gone.
    """

    def __init__(self) -> None:
        self._calls, self._waits = Aside("rank notes"), Aside("rank waits")
        self._calling: Any = None
        self._waiting: Any = None

    async def put(self, name: str, note: bytes) -> None:
        await self._calls.do(lambda: _reachable(lambda: self._store().set(name, note)))

    async def find(self, names: Sequence[str]) -> dict[str, bytes]:
        """Those of the notes that there are."""
        return await self._calls.do(lambda: _reachable(lambda: self._found(names)))

    async def await_one(self, name: str, timeout_s: float) -> bytes | None:
        """The note, as soon as there is one; None if there is none in time."""
        return await self._waits.do(lambda: _reachable(lambda: self._awaited(name, timeout_s)))

    async def remove(self, name: str) -> None:
        await self._calls.do(lambda: _reachable(lambda: self._store().delete_key(name)))

    def _store(self) -> Any:
        self._calling = self._calling or _connected()
        return self._calling

    def _found(self, names: Sequence[str]) -> dict[str, bytes]:
        store = self._store()
        there = [name for name in names if store.check([name])]
        return dict(zip(there, store.multi_get(there), strict=True)) if there else {}

    def _awaited(self, name: str, timeout_s: float) -> bytes | None:
        store = self._waiting = self._waiting or _connected()
        end = time.monotonic() + timeout_s
        while not store.check([name]):  # the store's own wait warns of each that ends without a note
            if time.monotonic() > end:
                return None
            time.sleep(_LOOK_S)
        note: bytes = store.get(name)
        return note


def _connected() -> Any:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CALL)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")  # torchrun's store outlives the ranks that it restarts
    return PrefixStore(f"/notes/attempt_{attempt}", store) if attempt else store


def _reachable(call: Any) -> Any:
    try:
        return call()
    except RuntimeError as error:
        text = str(error).partition("\n")[0][:300]
        raise Unavailable(f"the store where the ranks meet does not answer ({text})") from None
