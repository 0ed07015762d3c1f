"""Sends one case through a real proxy, over real sockets, to an engine that reads by h11."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Final

from msgspec import Struct, field

from ebbtide.serving_guard.proxy.proxy import Proxy
from ebbtide.serving_guard.settings import ProxySettings
from tests.http_fuzz.agreement import Evidence, disagreement
from tests.http_fuzz.answer_plans import AnswerPlan, answer_plan
from tests.http_fuzz.h11_engine import H11Engine
from tests.http_fuzz.http_reader import AnswerReader, HttpMessage, read_requests
from tests.http_fuzz.request_streams import RequestStream, request_stream

#: A case that takes longer hangs. The proxy's own time limits end a case within six seconds.
HANG_S: Final = 20.0
_LIMITS: Final = ProxySettings(
    header_timeout_s=4.0, body_timeout_s=4.0, drain_s=0.0, buffer_bytes=16 << 10, keep_body_bytes=16 << 10,
    max_held_bytes=4 << 20,
)  # fmt: skip
#: What one connection may hold (`ProxySettings`), and what one read brings.
_MOST_HELD: Final = 2 * (_LIMITS.max_header_bytes + _LIMITS.buffer_bytes) + _LIMITS.keep_body_bytes + (256 << 10)


class CaseResult(Struct):
    """`wrong` is empty if all agreed."""

    seed: int
    wrong: str = ""
    hung: bool = False
    passed: int = 0  # requests that the engine got
    refused: int = 0  # answers of the proxy itself
    kinds: list[str] = field(default_factory=list)


class NoTraffic:
    """A `TrafficListener` that does nothing."""

    def arrived(self, request: str, model: str, prompt_tokens: int, now: float, streamed: bool) -> None: ...

    def ready(self, request: str) -> None:
        return None

    def produced(self, request: str, tokens: int, now: float) -> None: ...

    def ended(self, request: str, ok: bool, now: float) -> None: ...


class FuzzStand:
    """A proxy and an engine that serve one case after the other, so that kept connections carry several cases."""

    def __init__(self, proxy: Proxy, engine: H11Engine) -> None:
        self.proxy, self.engine = proxy, engine

    async def run(self, seed: int) -> CaseResult:
        """Run the case of this seed."""
        rng = random.Random(seed)
        return await self.send(request_stream(rng), rng, seed)

    async def send(self, stream: RequestStream, rng: random.Random, seed: int) -> CaseResult:
        """Send this stream. `seed` determines the engine's answers."""
        result = CaseResult(seed, kinds=stream.kinds)
        self.engine.begin()
        self.engine.plan = lambda message: self._planned(result, message)
        try:
            async with asyncio.timeout(HANG_S):
                seen = await self._converse(rng, stream)
                await self._settle()
        except TimeoutError:
            result.hung, result.wrong = True, f"it hangs; the engine got {len(self.engine.served)} requests"
            return result
        seen.served, seen.engine_errors = self.engine.served, self.engine.errors
        result.wrong = disagreement(seen) or self._held(seen)
        result.passed = len(seen.served)
        result.refused = len(seen.answers.messages) - min(len(seen.answers.messages), result.passed)
        return result

    def _planned(self, result: CaseResult, message: HttpMessage) -> AnswerPlan:
        """The same plan for a request that is sent again."""
        number = message.header(b"x-index") or b"%d" % len(self.engine.served)
        plan = answer_plan(random.Random(f"{result.seed} {number.decode('latin-1')}"), message)
        result.kinds.append(plan.kind)
        return plan

    async def _converse(self, rng: random.Random, stream: RequestStream) -> Evidence:
        sent = read_requests(stream.whole)
        answers = AnswerReader([message.start[0] for message in sent.messages])
        complete = sum(message.complete for message in sent.messages)
        unsure = bool(sent.error) or (not sent.ended and not sent.between)
        leaves = rng.randrange(len(stream.pieces) + 1) if rng.random() < 0.03 else None
        waits = (
            bool(sent.error) or stream.refused or rng.random() < 0.02
        )  # for the proxy's end of an incomplete request
        host, port = self.proxy.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))

        async def read() -> None:
            while not answers.ended and not answers.error:
                if sum(one.complete for one in answers.messages) >= complete and not (unsure and waits):
                    return
                try:
                    answers.feed(await reader.read(1 << 16))
                except ConnectionError:
                    answers.ended = True

        reading = asyncio.create_task(read())
        self._most = 0
        try:
            for piece in stream.pieces[:leaves]:
                if writer.is_closing():
                    break
                writer.write(piece)
                await asyncio.sleep(0)
                self._most = max([self._most, *(one.held_bytes for one in self.proxy.clients._open)])
            if leaves is None:
                await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            writer.transport.abort()
        return Evidence(stream, sent, (), (), answers, left=leaves is not None)

    async def _settle(self) -> None:
        """Wait until no request is under way, so that nothing of this case reaches the next one."""
        clients, pool, turns = self.proxy.clients, self.proxy.pool, 0
        while len(clients) or len(pool) != len(pool._idle) or len(self.engine.open) != len(pool):
            turns += 1
            await asyncio.sleep(0 if turns < 50 else 0.002)

    def _held(self, seen: Evidence) -> str:
        if self._most > _MOST_HELD:
            return f"the proxy held {self._most} bytes for {len(seen.stream.whole)} of the client"
        return f"the proxy still holds {self.proxy.clients._held_bytes} bytes" if self.proxy.clients._held_bytes else ""


@contextlib.asynccontextmanager
async def fuzz_stand() -> AsyncIterator[FuzzStand]:
    """A proxy and its engine, until the end of the block."""
    engine = H11Engine()
    proxy = Proxy(_LIMITS, await engine.start(), NoTraffic(), "127.0.0.1:0")
    await proxy.start()
    try:
        yield FuzzStand(proxy, engine)
    finally:
        await proxy.stop()
        await engine.stop()
