"""Calls repeat themselves while the coordinator is away, streams resume, and what cannot be mended is said clearly."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client
from ebbtide.errors import InvalidRequest, Unauthenticated, Unavailable
from ebbtide.free_ports import free_port
from ebbtide.types.run import RunStatus
from tests.support.waiting import wait_until

SPEC: dict[str, Any] = {
    "name": "spell",
    "model": "model",
    "environment": {"name": "spell_backward", "params": {"n": 3}},
}


async def test_a_run_is_submitted_from_a_mapping_or_a_file(client: Client, script: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "spell"\nmodel = "model"\n[environment]\nname = "spell_backward"\nparams = {n = 3}\n')
    for spec in (SPEC, path, str(path)):
        run = await client.submit(spec)
        assert run.run_id.startswith("spell-")
        assert (run.status, run.spec.environment.params) == (RunStatus.PENDING, {"n": 3})
    assert len({request.run_id for request in script.calls("SubmitRun")}) == 3


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sampling": {"top_p": 2}}, "sampling.top_p"),
        ({"sampling": {"seed": 1}}, "sampling.seed"),
        ({"trainer": {"stepz": 1}}, "trainer.stepz"),
        ({"name": "a b"}, "name"),
    ],
)
async def test_a_bad_spec_is_refused_before_it_is_sent(change: dict[str, Any], field: str, client: Client) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        await client.submit({**SPEC, **change})
    assert refusal.value.field == field


async def test_a_file_that_is_no_toml_is_named(client: Client, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"absent\.toml"):
        await client.submit(tmp_path / "absent.toml")


async def test_a_restarted_coordinator_is_not_noticed_by_calls(client: Client, coordinator: Any) -> None:
    await client.run("run")
    await coordinator.stop()
    call = asyncio.create_task(client.run("run"))
    await asyncio.wait({call}, timeout=0.3)
    assert not call.done()
    await coordinator.start()
    assert (await call).run_id == "run"


async def test_a_submit_is_repeated_with_the_same_run_id(client: Client, script: Any) -> None:
    script.errors["SubmitRun"] = [Unavailable("away"), Unavailable("away")]
    run = await client.submit(SPEC)
    assert [request.run_id for request in script.calls("SubmitRun")] == [run.run_id] * 3


async def test_a_stream_goes_on_from_its_cursor_over_a_restart(client: Client, coordinator: Any, script: Any) -> None:
    script.finish(3)
    seen: list[str] = []
    async with client.claim("run") as lease:

        async def read() -> None:
            async for finished in lease.finished():
                seen.append(finished.cursor)  # noqa: PERF401 - as they come

        reader = asyncio.create_task(read())
        await wait_until(lambda: len(seen) == 3, what="the first three")
        await coordinator.stop()
        script.finish(6)
        await coordinator.start()
        await wait_until(lambda: len(seen) >= 6, what="the rest")
        reader.cancel()
    assert seen == ["1", "2", "3", "4", "5", "6"]
    cursors = [request.cursor for request in script.calls("WatchFinished")]
    assert (cursors[0], set(cursors[1:])) == ("", {"3"})


async def test_a_token_stream_goes_on_from_its_offset_and_ends_with_the_finish(client: Client, script: Any) -> None:
    chunks = [chunk async for chunk in client.stream_tokens("run", "r")]
    assert [(chunk.offset, len(chunk.tokens)) for chunk in chunks] == [(0, 24), (2, 24), (4, 0)]
    assert [request.offset for request in script.calls("StreamTokens")] == [0, 2]


async def test_a_coordinator_that_is_down_is_named_with_its_address_once_patience_ends() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with Client(address, security=ClientSecurity(token="t"), patience_s=0.5) as client:
        start = time.monotonic()
        with pytest.raises(Unavailable, match=rf"coordinator at {address} cannot be reached .*is it running"):
            await client.runs()
        with pytest.raises(Unavailable, match=rf"coordinator at {address} cannot be reached"):
            await anext(client.watch("run"))
        assert time.monotonic() - start < 8


async def test_a_relay_that_is_down_is_named_with_its_address(coordinator: Any) -> None:
    relay = f"127.0.0.1:{free_port()}"
    security = ClientSecurity(token="a-token-of-tests")
    async with Client(coordinator.address, relay, security=security, patience_s=0.5) as client:
        with pytest.raises(Unavailable, match=rf"weight-relay at {relay} cannot be reached"):
            await client.fetch_weights("run")


async def test_a_wrong_token_is_told_at_once(coordinator: Any) -> None:
    async with Client(coordinator.address, token="wrong") as client:
        with pytest.raises(Unauthenticated, match="EBBTIDE_TOKEN"):
            await client.runs()


async def test_addresses_and_token_come_from_the_environment(
    coordinator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EBBTIDE_TOKEN", raising=False)
    with pytest.raises(InvalidRequest, match="EBBTIDE_TOKEN"):
        Client(coordinator.address)
    (tmp_path / "token").write_text("a-token-of-tests\n")
    monkeypatch.setenv("EBBTIDE_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("EBBTIDE_COORDINATOR", coordinator.address)
    async with Client() as client:
        assert (await client.run("run")).run_id == "run"
    monkeypatch.setenv("EBBTIDE_COORDINATOR", "192.0.2.1:7600")
    with pytest.raises(InvalidRequest, match="TLS"):
        Client()


def test_the_sdk_imports_nothing_heavy() -> None:
    code = """
import sys, ebbtide.client
heavy = {"numpy", "torch", "vllm", "redis", "uvloop", "structlog", "prometheus_client", "transformers", "typer"}
print(*(heavy & set(sys.modules)))
import ebbtide.client.relay_client
print(*(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\nnumpy\n"
