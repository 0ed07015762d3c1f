"""Clients that send what would break a gateway crash nothing, learn nothing of others, and find its memory bounded."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx
import pytest

from tests.integration.gateway.hostile.hostile_requests import HostileRequest, draw_request
from tests.integration.gateway.hostile.hostile_server import LIMITS
from tests.support.waiting import wait_until

#: Connections at once: more than the bodies that fit.
AT_ONCE: Final = 12
#: A body that is parsed takes up to sixty times its bytes (empty lists), and one is parsed at a time; allocators keep
#: some of what is freed.
MEMORY_BOUND: Final = LIMITS.bodies_bytes + 100 * LIMITS.body_bytes
#: What any request may be answered. 500 is not among them.
ANSWERS: Final = {0, 100, 200, 400, 401, 403, 404, 405, 413, 429, 431}
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3})")
_MEMORY: Final = re.compile(r"^(VmHWM|VmRSS):\s+(\d+) kB$", re.MULTILINE)


class HostileStand:
    """The gateway's process."""

    def __init__(self, process: "subprocess.Popen[bytes]", address: str, keys: list[str]) -> None:
        self.process, self.keys = process, keys
        self.address = address
        self.host, _, port = address.rpartition(":")
        self.port = int(port)

    def memory(self) -> dict[str, int]:
        """Bytes in use now (`VmRSS`), and at most so far (`VmHWM`)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return {name: int(kib) << 10 for name, kib in _MEMORY.findall(status)}

    async def send(self, request: HostileRequest) -> int:
        """The status of the answer; 0 if there was none."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(request.data)
            await writer.drain()
            if not request.waits:
                return 0
            head = await reader.read(200)
            if not request.leaves_early:
                while await reader.read(1 << 16):
                    pass
        except ConnectionError:  # it closes on a client that goes on sending what it does not take
            return 0
        finally:
            writer.close()
        found = _STATUS.match(head)
        return int(found[1]) if found else 0

    async def ask(self, key: str, body: Any, **headers: str) -> httpx.Response:
        headers |= {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=f"http://{self.address}") as client:
            return await client.post("/v1/completions", json=body, headers=headers)


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[HostileStand]:
    ready = tmp_path / "ready.json"
    module = "tests.integration.gateway.hostile.hostile_server"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", module, str(ready), str(os.getpid())],
            stdout=log,
            stderr=log,
            cwd=Path(__file__).parents[4],
        )
    try:
        await wait_until(ready.exists, timeout=60, what="the gateway")
        told = json.loads(ready.read_text())
        yield HostileStand(process, told["address"], told["keys"])
    finally:
        process.kill()
        process.wait()


async def attack(stand: HostileStand, seed: int, count: int) -> Counter[tuple[str, int]]:
    """Send so many requests. How often each kind was answered with which status."""
    random = Random(seed)
    statuses: Counter[tuple[str, int]] = Counter()
    remaining = iter(range(count))

    async def client() -> None:
        for _ in remaining:
            request = draw_request(random, stand.keys)
            async with asyncio.timeout(120):
                status = await stand.send(request)
            statuses[request.kind, status] += 1

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return statuses


async def hold_out(stand: HostileStand, seed: int, count: int) -> None:
    await attack(stand, seed + 1, 100)  # imports, templates' processes and caches are there from now on
    before = stand.memory()["VmRSS"]
    statuses = await attack(stand, seed, count)
    assert statuses.total() == count
    assert {status for _, status in statuses} <= ANSWERS, statuses
    assert stand.process.poll() is None
    assert stand.memory()["VmHWM"] - before < MEMORY_BOUND
    answer = await stand.ask(stand.keys[0], {"prompt": "x", "max_tokens": 4})
    assert answer.status_code == 200
    kinds = {kind for kind, _ in statuses}
    assert {"exploding schema", "giant", "nested", "unfinished body"} <= kinds
    assert {status for kind, status in statuses if kind == "another's ids"} <= {0, 200, 429}


async def test_hostile_clients_break_nothing(stand: HostileStand) -> None:
    await hold_out(stand, 18, 400)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_ten_thousand_hostile_requests_break_nothing(stand: HostileStand) -> None:
    await hold_out(stand, 19, 10_000)


async def test_the_ids_of_anothers_request_and_session_tell_nothing(stand: HostileStand) -> None:
    ids = {"x-request-id": "turn-1", "x-session-id": "episode-1"}
    mine = {"prompt": "the dog", "max_tokens": 8}
    first = await stand.ask(stand.keys[0], mine, **ids)
    other = await stand.ask(stand.keys[1], {"prompt": "the fox", "max_tokens": 4}, **ids)
    assert (first.status_code, other.status_code) == (200, 200)
    assert (await stand.ask(stand.keys[0], mine, **ids)).json()["choices"] == first.json()["choices"]
    assert (await stand.ask(stand.keys[0], {"prompt": "the fox"}, **ids)).status_code == 409
