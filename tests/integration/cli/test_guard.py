"""`ebbtide guard status` against a guard on a real socket."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.auth.security import ServerSettings
from ebbtide.grants import socket_path
from ebbtide.rpc.server import Server
from ebbtide.v1 import grants_pb2 as pb
from ebbtide.v1.grants_pb2_grpc import GrantsServicer, add_GrantsServicer_to_server


class Guarding(GrantsServicer):
    async def WatchGuard(self, request: pb.WatchGuardRequest, context: Any) -> AsyncIterator[pb.GuardStatus]:
        yield pb.GuardStatus(
            model="chat",
            state="idle",
            tokens=256,
            sequences=32,
            slack_s=-1,
            borrowers=[
                pb.Borrower(worker_id="w1", state="granted", tokens_harvested=4321, residency=pb.RESIDENCY_AWAKE)
            ],
        )


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    kind: Any = Guarding  # the stubs call all methods abstract
    settings = ServerSettings(listen=f"unix:{socket_path(tmp_path)}")
    server = Server(settings, [(add_GrantsServicer_to_server, kind(), "ebbtide.v1.Grants")], private=True)
    await server.start()
    yield tmp_path
    await server.stop(0.0)


async def start(*words: str) -> asyncio.subprocess.Process:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ebbtide.cli", "guard", "status", *words, env={**clean, "COLUMNS": "200"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def status(*words: str) -> tuple[int | None, str, str]:
    process = await start(*words)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_guard_of_a_folder_is_asked_without_a_token(folder: Path) -> None:
    code, out, err = await status("--grant-dir", str(folder))
    assert (code, err) == (0, "")
    assert "chat: idle, 0 in flight (0 wait)" in out
    assert "256 tokens of 32 rollouts" in out
    assert "4,321" in out


async def test_programs_get_json_from_its_socket(folder: Path) -> None:
    code, out, err = await status("--address", f"unix:{socket_path(folder)}", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["borrowers"][0]["worker_id"] == "w1"


async def test_it_is_watched_until_interrupted(folder: Path) -> None:
    process = await start("--grant-dir", str(folder), "--watch", "--every", "0.1")
    assert process.stdout is not None
    seen = [(await process.stdout.readline()).decode() for _ in range(4)]
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 0
    assert sum("chat: idle" in line for line in seen) == 2
    assert sum("w1 granted" in line for line in seen) == 2


async def test_where_no_guard_answers_it_says_how_to_start_one(tmp_path: Path) -> None:
    code, out, err = await status("--grant-dir", str(tmp_path))
    assert (code, out) == (1, "")
    assert err.startswith(f"ebbtide: no guard answers at {socket_path(tmp_path)}; start one")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--grant-dir: name either the guard's folder or its --address"),
        (("--grant-dir", "x", "--json", "--watch"), "--json: excludes --watch"),
    ],
)
async def test_what_cannot_be_asked_is_refused_by_its_flag(words: tuple[str, ...], said: str) -> None:
    code, _, err = await status(*words)
    assert code == 2
    assert err.startswith(f"ebbtide: {said}")
