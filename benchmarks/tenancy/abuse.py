"""The user who is at a limit: a process at the lowest priority that goes to one limit and stays there.

    python -m benchmarks.tenancy.abuse KIND ADDRESS

Prints READY at the limit. What is refused is tried again when the refusal says, except by the kinds in `RUDE`.
"""

import asyncio
import os
import random
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import uvloop

from benchmarks.tenancy.calls import DEADLINE_S, User, submission
from ebbtide.errors import EbbtideError, NoCapacity, Unavailable
from ebbtide.rpc.status_table import translated
from ebbtide.v1 import rollouts_pb2, runs_pb2

#: How the names of all its runs begin.
RUN: Final = "greedy"
#: Kinds that do not wait after a refusal.
RUDE: Final = ("requests", "refused", "deadlines")
_BATCH: Final = 2048
_LANES: Final = 32
_STREAMS: Final = 900
_RENEW_S: Final = 3.0


async def polite(call: Callable[[], Awaitable[Any]]) -> bool:
    """Call; after a refusal for want of room wait as it says. Whether the call was taken."""
    try:
        with translated("coordinator"):
            await call()
    except NoCapacity as error:
        await asyncio.sleep(error.retry_after_s)
        return False
    except Unavailable:
        await asyncio.sleep(1.0)
        return False
    return True


async def rude(call: Callable[[], Awaitable[Any]]) -> None:
    """Call, and call again at once whatever comes back."""
    try:
        await call()
    except grpc.aio.AioRpcError:
        await asyncio.sleep(0)


class Abuser:
    def __init__(self, address: str) -> None:
        self._address, self.user = address, User(address)
        self._run = f"{RUN}.{os.getpid()}"
        self._numbers = iter(range(1 << 60))
        self._lease = runs_pb2.LeaseRef()

    def _names(self, count: int) -> list[str]:
        return [f"g{next(self._numbers)}" for _ in range(count)]

    async def begin(self) -> None:
        self._lease = await self.user.run(self._run, version=False)  # what is queued waits for a version

    async def _submit(self, count: int) -> Any:
        return await self.user.rollouts.Submit(submission(self._lease, *self._names(count)), timeout=DEADLINE_S)

    async def _for_ever(self, step: Callable[[], Awaitable[Any]], lanes: int) -> None:
        async def lane() -> None:
            while True:
                await step()

        print("READY", flush=True)
        await asyncio.gather(*(lane() for _ in range(lanes)))

    async def runs(self) -> None:
        """As many live runs as a user may have, with leases that are renewed, and one more is tried."""
        leases: list[runs_pb2.LeaseRef] = []

        async def more() -> None:
            leases.append(await self.user.run(f"{self._run}.{len(leases)}", version=True))

        while await polite(more):
            if len(leases) > 1000:
                raise RuntimeError("no limit of runs was met")

        async def live() -> None:
            for lease in leases:
                await self.user.runs.RenewLease(lease, timeout=DEADLINE_S)
                await asyncio.sleep(_RENEW_S / len(leases))

        await asyncio.gather(self._for_ever(live, 1), self._for_ever(lambda: polite(more), 1))

    async def _fill(self) -> None:
        while await polite(lambda: self._submit(_BATCH)):
            pass
        while await polite(lambda: self._submit(64)):
            pass

    async def queue(self) -> None:
        """A full queue, to which more is submitted."""
        await self._fill()
        await self._for_ever(lambda: polite(lambda: self._submit(64)), _LANES)

    async def refused(self) -> None:
        """As `queue`, but without a pause after a refusal."""
        await self._fill()
        await self._for_ever(lambda: rude(lambda: self._submit(1)), _LANES)

    async def readers(self) -> None:
        """As many streams as a connection may have, which read a run whose events keep coming."""
        kinds = (
            lambda: self.user.runs.WatchRun(runs_pb2.WatchRunRequest(run_id=self._run)),
            lambda: self.user.rollouts.WatchFinished(rollouts_pb2.WatchFinishedRequest(run_id=self._run)),
            lambda: self.user.rollouts.WatchTrajectories(rollouts_pb2.WatchTrajectoriesRequest(run_id=self._run)),
        )

        async def read(number: int) -> None:
            async def whole() -> None:
                async for _ in kinds[number % len(kinds)]():
                    pass

            while True:
                await polite(whole)

        readers = [asyncio.create_task(read(number)) for number in range(_STREAMS)]
        await self._report(1)

        async def event() -> None:
            await polite(lambda: self._report(1))
            await asyncio.sleep(0.5)

        await asyncio.gather(self._for_ever(event, 1), *readers)

    async def _report(self, count: int) -> None:
        events = [runs_pb2.RunEvent(kind="note", key=name, message="m" * 200) for name in self._names(count)]
        await self.user.runs.Report(runs_pb2.ReportRequest(lease=self._lease, events=events), timeout=DEADLINE_S)

    async def events(self) -> None:
        """Events in the largest calls, one after another."""
        await self._for_ever(lambda: polite(lambda: self._report(2048)), 2)

    async def requests(self) -> None:
        """Requests that nothing refuses, as many at once as the lanes are."""
        get = runs_pb2.GetRunRequest(run_id=self._run)
        await self._for_ever(lambda: rude(lambda: self.user.runs.GetRun(get, timeout=DEADLINE_S)), _LANES)

    async def deadlines(self) -> None:
        """Writes that are given up in the middle."""
        draw = random.Random(1)

        async def step() -> None:
            names, timeout = self._names(16), draw.choice((0.001, 0.002, 0.004, 0.008))
            await rude(lambda: self.user.rollouts.Submit(submission(self._lease, *names), timeout=timeout))
            drop = rollouts_pb2.CancelRequest(lease=self._lease, rollout_ids=names)
            await rude(lambda: self.user.rollouts.Cancel(drop, timeout=timeout))

        await self._for_ever(step, _LANES)


KINDS: Final = ("runs", "queue", "readers", "events", "requests", "refused", "deadlines")


async def main(kind: str, address: str) -> None:
    abuser = Abuser(address)
    if kind != "runs":
        await abuser.begin()
    await getattr(abuser, kind)()


if __name__ == "__main__":
    os.nice(19)
    if sys.argv[1] not in KINDS:
        raise EbbtideError(f"{sys.argv[1]} is none of {', '.join(KINDS)}")
    uvloop.run(main(sys.argv[1], sys.argv[2]))
