"""A reader of a leased stream that is cancelled at the moment at which the run ends leaves no error behind."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from typing import Any

from ebbtide.client.held_lease import HeldLease
from ebbtide.errors import LeaseSuperseded


class EndingPeer:
    """A service whose stream ends with the run."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()

    async def follow(self, _resume: Any) -> AsyncGenerator[str, None]:
        await self.ends.wait()
        if self.ends.is_set():
            raise LeaseSuperseded("run r has ended")
        yield ""


def test_a_cancelled_reader_leaves_no_error_of_the_stream_behind() -> None:
    said: list[dict[str, Any]] = []

    async def read() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        lease: Any = HeldLease.__new__(HeldLease)
        lease.lost, lease._check, lease._peer = asyncio.Event(), lambda: None, EndingPeer()
        reader = asyncio.ensure_future(anext(lease._follow(lambda: None)))
        mine = {asyncio.current_task(), reader}
        while len(following := asyncio.all_tasks() - mine) < 2:  # noqa: ASYNC110 - each turn of the loop
            await asyncio.sleep(0)
        lease._peer.ends.set()
        while not any(one.done() for one in following):  # noqa: ASYNC110 - no turn more than that
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)

    asyncio.run(read())
    gc.collect()
    assert not said
