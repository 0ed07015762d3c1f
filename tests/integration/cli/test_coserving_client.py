"""The users of the co-serving demo, against a server on a real socket."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from ebbtide.demo.coserving.coserving_client import TrafficPlan, replay
from ebbtide.demo.coserving.coserving_records import ServedAnswer
from ebbtide.demo.coserving.request_traffic import TrafficRequest
from tests.support.waiting import wait_until


class Server:
    """Streams as many tokens as it is asked for, each when it is let to."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.go = asyncio.Event()
        self.url = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if len(body["prompt"]) == 13:
            raise web.HTTPServiceUnavailable
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            await self.go.wait()
        if len(body["prompt"]) != 14:
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


async def test_requests_are_sent_when_they_are_due_whoever_still_waits(server: Server) -> None:
    plan = TrafficPlan(requests=[TrafficRequest(0.0, 8, 4), TrafficRequest(0.05, 20, 2), TrafficRequest(0.05, 30, 2)])
    task = asyncio.create_task(replay(server.url, "m", plan))
    await wait_until(lambda: len(server.bodies) == 3, what="all requests, none of which was answered")
    server.go.set()
    answers = await task
    assert [one.failed for one in answers] == [""] * 3
    assert [one.due - answers[0].due for one in answers] == pytest.approx([0.0, 0.05, 0.05])
    assert all(one.due <= one.sent <= one.first <= one.last for one in answers)
    first = server.bodies[0]
    assert (first["model"], first["max_tokens"], first["stream"], first["ignore_eos"]) == ("m", 4, True, True)
    prompts = [body["prompt"] for body in server.bodies]
    assert sorted(map(len, prompts)) == [8, 20, 30]  # type: ignore[arg-type]


async def test_an_answer_that_is_refused_or_ends_early_has_failed_and_says_why(server: Server) -> None:
    server.go.set()
    refused, cut = await replay(
        server.url, "m", TrafficPlan(requests=[TrafficRequest(0.0, 13, 2), TrafficRequest(0.0, 14, 2)])
    )
    assert "503" in refused.failed
    assert cut.failed == "EOFError: the stream ended early"


async def test_asked_to_end_it_sends_no_more_waits_for_what_is_under_way_and_writes_it(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_bytes(
        msgspec.json.encode(TrafficPlan(requests=[TrafficRequest(0.0, 8, 3), TrafficRequest(900.0, 8, 3)]))
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ebbtide.demo.coserving.coserving_client", "--url", server.url, "--model", "m",
        "--plan", str(tmp_path / "plan.json"), "--out", str(tmp_path / "out.json"),
    )  # fmt: skip
    await wait_until(lambda: len(server.bodies) == 1, timeout=30, what="the first request")
    process.send_signal(signal.SIGTERM)
    server.go.set()
    assert await process.wait() == 0
    (only,) = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=list[ServedAnswer])
    assert (only.output, only.failed) == (3, "")
    assert json.loads((tmp_path / "out.json").read_text())[0]["prompt"] == 8
