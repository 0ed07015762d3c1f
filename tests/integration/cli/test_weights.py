"""`ebbtide run weights` against a relay on a real socket."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.client import SyncClient
from ebbtide.rpc.server import Server
from ebbtide.v1 import types_pb2
from ebbtide.v1 import weights_pb2 as pb
from ebbtide.v1.weights_pb2_grpc import WeightsServicer, add_WeightsServicer_to_server

TOKEN = "a-token-of-tests"


class Described(WeightsServicer):
    """A relay that knows one run, `r`, with two versions."""

    async def DescribeVersions(self, request: pb.DescribeVersionsRequest, context: Any) -> pb.DescribeVersionsResponse:
        if request.run_id != "r":
            return pb.DescribeVersionsResponse()
        records = [types_pb2.PolicyVersion(policy="policy", version=n, step=n - 1, root=b"\1" * 32) for n in (1, 2)]
        infos = [pb.VersionInfo(run_id="r", version=one, size=50_000_000, tensors=7) for one in records]
        patch = pb.PatchState(base=1, size=1_000_000, density=0.03)
        holder = pb.HolderState(holder=pb.Holder(name="w1"), policy="policy", version=2, done=True, install_s=0.5)
        return pb.DescribeVersionsResponse(
            versions=[pb.VersionState(info=infos[0], keyframe=True), pb.VersionState(info=infos[1], patches=[patch])],
            holders=[holder],
            links=[pb.LinkState(site="north", bytes=1_000_000)],
        )


@pytest.fixture
async def relay() -> AsyncIterator[str]:
    settings = ServerSettings(listen="127.0.0.1:0", token=TOKEN)
    kind: Any = Described  # the stubs call all methods abstract
    server = Server(settings, [(add_WeightsServicer_to_server, kind(), "ebbtide.v1.Weights")])
    await server.start()
    yield server.address
    await server.stop(0.0)


async def start(*words: str, token: str = TOKEN) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ebbtide.cli", *words, env={**os.environ, "EBBTIDE_TOKEN": token, "COLUMNS": "200"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def ebbtide(*words: str, token: str = TOKEN) -> tuple[int | None, str, str]:
    process = await start(*words, token=token)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_versions_holders_and_links_are_told(relay: str) -> None:
    status, out, err = await ebbtide("run", "weights", "r", "--relay", relay)
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert "2 versions, the newest 2 of 50 MB; a patch from 1 takes 50x less; 1 have it" in out
    assert ["2", "1", "0:00", "50", "MB", "1", "1", "MB", "50x", "3.00%"] in rows
    assert ["w1", "2", "has", "500", "ms", "0", "s"] in rows


async def test_programs_get_json(relay: str) -> None:
    status, out, err = await ebbtide("run", "weights", "r", "--relay", relay, "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert [one["info"]["version"]["version"] for one in told["versions"]] == [1, 2]
    status, _, err = await ebbtide("run", "weights", "r", "--relay", relay, "--json", "--watch")
    assert (status, err) == (2, "ebbtide: --json: excludes --watch; call it again and again\n")


async def test_it_is_watched_until_interrupted(relay: str) -> None:
    process = await start("run", "weights", "r", "--relay", relay, "--watch", "--every", "0.1")
    assert process.stdout is not None
    seen = [(await process.stdout.readline()).decode() for _ in range(10)]
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 0
    assert sum("version 2: step 1; 50 MB; from 1 1 MB (50x smaller, 3.00% changed)" in line for line in seen) == 2


@pytest.mark.parametrize(
    ("words", "token", "ends", "said"),
    [
        (("nobody",), TOKEN, 1, "knows no version of run nobody"),
        (("r",), "another", 2, "token"),
    ],
)
async def test_what_cannot_be_told_is_said_in_one_line(
    relay: str, words: tuple[str, ...], token: str, ends: int, said: str
) -> None:
    status, out, err = await ebbtide("run", "weights", *words, "--relay", relay, token=token)
    assert (status, out) == (ends, "")
    assert err.startswith("ebbtide: ")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.timeout(60)
async def test_a_relay_that_is_not_there_is_named_with_its_address() -> None:
    status, out, err = await ebbtide("run", "weights", "r", "--relay", "127.0.0.1:9")
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("ebbtide: weight-relay at 127.0.0.1:9 cannot be reached")


async def test_a_program_without_asyncio_asks_too(relay: str) -> None:
    def use() -> int:
        with SyncClient(relay=relay, security=ClientSecurity(token=TOKEN)) as client:
            return client.describe_weights("r").versions[1].patches[0].size

    assert await asyncio.to_thread(use) == 1_000_000
