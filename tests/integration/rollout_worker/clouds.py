"""Metadata servers of three clouds, imitated on the loopback as their documentation describes them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
#: How far the clock of the cloud is from that of this machine.
SKEW = timedelta(days=3)


class Cloud:
    """`trouble`: what is answered instead, until it is None again. Counts what was asked, and answered well."""

    def __init__(self) -> None:
        self.asked = self.answered = 0
        self.dated = True
        self.trouble: Handler | None = None
        self.url = ""

    def now(self) -> datetime:
        return datetime.now(UTC) + SKEW

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    async def start(self) -> None:
        app = web.Application(middlewares=[self._troubled])
        app.add_routes(self.routes())
        app.on_response_prepare.append(self._date)
        runner = self._runner = web.AppRunner(app, shutdown_timeout=0.0, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def stop(self) -> None:
        self.answer_all()
        await self._runner.cleanup()

    def answer_all(self) -> None:
        """Let no question hang any more."""

    @web.middleware
    async def _troubled(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.asked += 1
        if self.trouble is not None:
            return await self.trouble(request)
        response = await handler(request)
        self.answered += 1
        return response

    async def _date(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers["Date"] = format_datetime(self.now(), usegmt=True) if self.dated else ""


class Aws(Cloud):
    """IMDSv2: tokens expire when `forget` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.action: dict[str, Any] | None = None
        self.tokens: set[str] = set()
        self.given = 0

    def forget(self) -> None:
        self.tokens.clear()

    def preempt(self, within_s: float, action: str = "terminate") -> None:
        end = self.now() + timedelta(seconds=within_s)
        self.action = {"action": action, "time": end.strftime("%Y-%m-%dT%H:%M:%SZ")}

    def routes(self) -> list[web.RouteDef]:
        return [web.put("/latest/api/token", self._token), web.get("/latest/meta-data/spot/instance-action", self._ask)]

    async def _token(self, request: web.Request) -> web.Response:
        assert 1 <= int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
        self.given += 1
        self.tokens.add(token := f"token-{self.given}")
        return web.Response(text=token)

    async def _ask(self, request: web.Request) -> web.Response:
        if request.headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return web.Response(status=401)
        if self.action is None:
            return web.Response(status=404, text="<html>Not Found</html>")
        return web.json_response(self.action)


class Gcp(Cloud):
    def __init__(self) -> None:
        super().__init__()
        self._value, self._changed = "FALSE", asyncio.Event()
        self.hanging = 0

    def answer_all(self) -> None:
        self._changed.set()

    def preempt(self, within_s: float) -> None:
        self._value = "TRUE"
        self.answer_all()

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/computeMetadata/v1/instance/preempted", self._ask)]

    async def _ask(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata-Flavor") != "Google":
            return web.Response(status=403)
        if request.query.get("wait_for_change") == "true" and request.query["last_etag"] == self._etag():
            self.hanging += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(float(request.query["timeout_sec"])):
                    await self._changed.wait()
            self.hanging -= 1
        return web.Response(text=self._value, headers={"ETag": self._etag(), "Metadata-Flavor": "Google"})

    def _etag(self) -> str:
        return "aaaa0001" if self._value == "FALSE" else "bbbb0002"


class Azure(Cloud):
    """`delay`: the first answer takes its time. `name`: of this machine; empty: not told."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.name = "me_0"
        self.delay = asyncio.Event()
        self.delay.set()
        self.acknowledged = 0

    def answer_all(self) -> None:
        self.delay.set()

    def schedule(self, kind: str, within_s: float | None, **changes: Any) -> None:
        """An event; without a time it has begun."""
        start = "" if within_s is None else format_datetime(self.now() + timedelta(seconds=within_s), usegmt=True)
        event = {
            "EventId": f"id-{len(self.events)}",
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": [self.name],
            "EventStatus": "Started" if within_s is None else "Scheduled",
            "NotBefore": start,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        self.events.append(event | changes)

    def preempt(self, within_s: float) -> None:
        self.schedule("Preempt", within_s)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/metadata/scheduledevents", self._ask),
            web.post("/metadata/scheduledevents", self._acknowledge),
            web.get("/metadata/instance/compute/name", self._name),
        ]

    async def _ask(self, request: web.Request) -> web.Response:
        if request.headers.get("Metadata") != "true" or request.query.get("api-version") != "2020-07-01":
            return web.Response(status=400)
        await self.delay.wait()
        return web.Response(
            text=json.dumps({"DocumentIncarnation": len(self.events), "Events": self.events}),
            content_type="application/json",
        )

    async def _acknowledge(self, _: web.Request) -> web.Response:
        self.acknowledged += 1
        return web.Response()

    async def _name(self, _: web.Request) -> web.Response:
        return web.Response(text=self.name) if self.name else web.Response(status=404)
