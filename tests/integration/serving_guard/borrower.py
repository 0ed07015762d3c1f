"""A worker that borrows, as small as can be: a process with a stream to the guard, and an engine process below it that
steps as its page allows.

`python -m tests.integration.serving_guard.borrower FOLDER WORKER_ID MANNER STEP_S`. The manners of the engine: `fair`;
`stubborn`, which steps on whatever the budget once it had one; `stuck`, whose first step behind a file `FOLDER/stick`
never ends. A worker gives up memory when its grants say so, but for `hoarding`.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from ebbtide.grants import Page, page_path, socket_path
from ebbtide.rpc.channel import open_socket
from ebbtide.types.grants import GRANTS_VERSION, BorrowerReport, Grant, Hello, Residency
from ebbtide.v1 import grants_pb2 as pb
from ebbtide.v1.grants_pb2_grpc import GrantsStub
from ebbtide.wire import from_proto, to_proto
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
TOKENS = 4  # of each step


class Borrowing:
    """Starts such a worker and reads its page."""

    def __init__(
        self,
        folder: Path,
        worker_id: str = "w1",
        manner: str = "fair",
        step_s: float = 0.005,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.worker_id = folder, worker_id
        page = Page(page_path(folder, worker_id), create=True)
        page.close()
        self.page = Page(page_path(folder, worker_id))
        arguments = (str(folder), worker_id, manner, str(step_s))
        self.process = subprocess.Popen([sys.executable, "-m", __name__, *arguments], cwd=ROOT, env=environment)

    @property
    def engine(self) -> int:
        return self.page.steps().pid

    @property
    def stepping_lately(self) -> bool:
        steps = self.page.steps()
        return steps.stepping or time.monotonic() - steps.ended < 0.02

    def state(self) -> str:
        """The state of the engine's process in proc(5); X if it is gone."""
        try:
            return Path(f"/proc/{self.engine}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "X"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        engine = self.engine
        for pid in (self.process.pid, engine):
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, 9)
        self.process.wait(10)


def step_for_ever(folder: Path, worker_id: str, manner: str, step_s: float, parent: int) -> None:
    page = Page(page_path(folder, worker_id))
    page.enter(os.getpid(), kv_total=64, block_bytes=1024)
    had = False
    while os.getppid() == parent:
        budget = page.await_budget(0.0 if had and manner == "stubborn" else 0.05)
        had = had or budget.tokens > 0
        heeding = not (had and manner == "stubborn")
        budget = page.begin_step(heeding=heeding)
        if heeding and not budget.tokens:
            continue
        time.sleep(step_s)
        while manner == "stuck" and (folder / "stick").exists():
            time.sleep(0.01)
        page.end_step(min(TOKENS, budget.tokens) or TOKENS)


async def borrow(folder: Path, worker_id: str, manner: str, engine: subprocess.Popen[bytes]) -> None:
    page = Page(page_path(folder, worker_id))
    await wait_until(lambda: page.steps().pid == engine.pid)
    while engine.poll() is None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with open_socket(socket_path(folder)) as channel:
                await _stream(GrantsStub(channel), page, worker_id, engine.pid, hoarding=manner == "hoarding")
        page.renew(0.0)
        await asyncio.sleep(0.05)


async def _stream(stub: GrantsStub, page: Page, worker_id: str, pid: int, *, hoarding: bool) -> None:
    newest = Grant(sequence=0)

    async def news() -> AsyncIterator[pb.BorrowerMessage]:
        hello = Hello(
            protocol_version=GRANTS_VERSION, worker_id=worker_id, pids=(pid,), slots=8, step_tokens=64, kv_bytes=1 << 16
        )
        yield pb.BorrowerMessage(hello=to_proto(hello, pb.Hello))
        while True:
            at = Residency.AWAKE if hoarding else newest.residency
            made = BorrowerReport(tokens_generated=page.steps().scheduled, residency=at, grant=newest.sequence)
            yield pb.BorrowerMessage(report=to_proto(made, pb.Report))
            await asyncio.sleep(0.1)

    call: Any = stub.Borrow(news())
    async for message in call:
        newest = from_proto(message, Grant)
        page.renew(time.monotonic() + newest.expires_s if newest.tokens else 0.0)


def main() -> None:
    folder, worker_id, manner, step_s = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    child = os.fork()
    if not child:
        step_for_ever(folder, worker_id, manner, step_s, os.getppid())
        os._exit(0)

    class Child:
        pid = child

        def poll(self) -> int | None:
            return None if os.waitpid(child, os.WNOHANG)[0] == 0 else 1

    asyncio.run(borrow(folder, worker_id, manner, Child()))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
