"""Users who never leave, against a server on a real socket that cuts an answer short."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from ebbtide.demo.coserving.request_traffic import TrafficBursts
from ebbtide.demo.coserving.steady_users import MOST_OPEN, SteadyUsers, UsersAccount
from ebbtide.errors import InvalidRequest
from tests.support.waiting import wait_until

BURSTS = TrafficBursts(quiet_s=0.05, apart_s=0.01, prompt=8, output=3)


class Server:
    """Streams the tokens that it is asked for. The first answer, and those that come while it is `away`, are cut."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.away = False
        self.answers = asyncio.Event()  # set: begins answers
        self.answers.set()
        self.status = 200
        self.url = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        self.asked.append(text)
        await self.answers.wait()
        if self.status != 200:
            return web.Response(status=self.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(json.loads(text)["max_tokens"]):
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        if len(self.asked) > 1 and not self.away:
            await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made, app = Server(), web.Application()
    app.router.add_post("/v1/completions", made.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


async def test_a_request_that_was_cut_is_sent_again_until_it_is_served(server: Server) -> None:
    users, stop = SteadyUsers(server.url, "m", bursts=BURSTS), asyncio.Event()
    running = asyncio.create_task(users.run(stop))
    await wait_until(lambda: users.account().ended > 20, what="some answers")
    assert server.asked.count(server.asked[0]) == 2, "the same one, once more"
    server.away = True
    await wait_until(lambda: users.account().again > 5, what="answers that are cut")
    stop.set()
    asked = users.account().sent
    await asyncio.sleep(0)
    assert not running.done(), "what was sent has not ended"
    server.away = False
    await running
    account = users.account()
    assert (account.sent, account.ended) == (asked, asked)
    assert 0 < account.ttft_p50_ms <= account.ttft_p99_ms
    assert account.tpot_p99_ms > 0


async def test_users_do_not_pile_up_before_a_server_that_does_not_answer(server: Server) -> None:
    server.answers.clear()
    users, stop = SteadyUsers(server.url, "m", bursts=BURSTS), asyncio.Event()
    running = asyncio.create_task(users.run(stop))
    await wait_until(lambda: users.account().skipped > 3, what="requests that are due beside as many as may be open")
    assert (users.account().sent, users.account().ended) == (MOST_OPEN, 0)
    server.answers.set()
    await wait_until(lambda: users.account().sent > MOST_OPEN, what="more, where others have ended")
    stop.set()
    await running


async def test_a_request_that_is_refused_ends_the_program_and_one_that_comes_too_early_does_not(server: Server) -> None:
    server.status = 429
    users = SteadyUsers(server.url, "m", bursts=BURSTS)
    running = asyncio.create_task(users.run(asyncio.Event()))
    await wait_until(lambda: users.account().again > 2, what="some are sent again")
    server.status = 400
    with pytest.raises(InvalidRequest, match="400"):
        await running


async def test_the_program_says_what_users_got_and_ends_when_it_is_asked_to(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "users.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ebbtide.demo.coserving.steady_users", "--url", server.url, "--model", "m",
        "--every-s", "0.2", "--out", str(out), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    await wait_until(lambda: out.exists() and json.loads(out.read_text())["ended"] > 0, timeout=60, what="an answer")
    process.send_signal(signal.SIGTERM)
    said = [msgspec.json.decode(line, type=UsersAccount) for line in (await process.stdout.read()).splitlines()]
    assert await process.wait() == 0
    assert said[-1] == msgspec.json.decode(out.read_bytes(), type=UsersAccount)
    assert said[-1].sent == said[-1].ended >= said[0].ended
