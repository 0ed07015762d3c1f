"""The one connection to the store: in order, in one pipe, and back by itself."""

import asyncio
from typing import Any

import pytest

from ebbtide.errors import StoreUnavailable
from ebbtide.store.connection import StoreConnection
from ebbtide.store.scripts import LuaScript
from ebbtide.store.store import Store
from tests.fakes.clocks import compiler
from tests.fakes.disks import StallingDisk
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until


@pytest.fixture
def server(tmp_path: Any) -> Any:
    with EmbeddedRedis(tmp_path / "redis") as made:
        yield made


@pytest.fixture
async def link(server: Any) -> Any:
    made = StoreConnection(server.url, patience_s=10)
    await made.open()
    yield made
    await made.close()


async def test_many_callers_share_one_connection_and_each_gets_its_own_answer(link: Any) -> None:
    await asyncio.gather(*(link.call("SET", f"k{i}", i) for i in range(500)))
    assert await asyncio.gather(*(link.call("GET", f"k{i}") for i in range(500))) == [b"%d" % i for i in range(500)]
    clients = await link.call("CLIENT", "LIST")
    assert clients.count(b"\n") == 1


async def test_a_caller_that_goes_away_shifts_nobodys_answer(link: Any) -> None:
    await link.call("SET", "k", "v")
    callers = [asyncio.create_task(link.call("ECHO", str(number))) for number in range(50)]
    await asyncio.sleep(0)
    for caller in callers[::3]:
        caller.cancel()
    found = await asyncio.gather(*callers, return_exceptions=True)
    for number, answer in enumerate(found):
        assert isinstance(answer, asyncio.CancelledError) if number % 3 == 0 else answer == b"%d" % number
    assert await link.call("GET", "k") == b"v"


async def test_calls_made_while_the_link_is_broken_are_done_on_the_next_one(link: Any, server: Any) -> None:
    life = link.incarnation
    await link.call("SET", "kept", "1")
    broken = [asyncio.create_task(link.call("INCR", f"n{number}")) for number in range(20)]
    server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert await asyncio.gather(*broken) == [1] * 20
    assert await link.call("GET", "kept") == b"1"
    assert link.incarnation == life


async def test_a_call_begun_in_one_life_of_the_store_is_not_sent_in_another(link: Any, server: Any) -> None:
    life, came = link.incarnation, list[str]()
    link.watch(lambda: came.append(link.incarnation))
    await link.call("SET", "kept", "1")
    server.freeze()
    sent = [asyncio.create_task(link.call("INCR", "sent")) for _ in range(5)]
    await wait_until(lambda: not link._out)
    server.kill()
    await wait_until(lambda: not link._up.is_set())
    unsent = [asyncio.create_task(link.call("INCR", "unsent")) for _ in range(5)]
    await asyncio.sleep(0)
    server.start()
    for refused in await asyncio.gather(*sent, *unsent, return_exceptions=True):
        assert isinstance(refused, StoreUnavailable)
        assert "came back" in str(refused)
    assert came == [link.incarnation]
    assert link.incarnation != life
    assert await link.call("GET", "unsent") is None
    assert await link.call("GET", "kept") == b"1"


async def test_what_is_to_be_durable_is_not_called_so_in_another_life(link: Any, server: Any) -> None:
    await link.call("CONFIG", "SET", "appendfsync", "everysec")
    assert (await Store(link, "term").server_info()).durable_after_s == 2.0
    await link.call("SET", "rare", "1")
    waiting = asyncio.create_task(link.durable())
    await asyncio.sleep(0)
    server.kill()
    server.start()
    with pytest.raises(StoreUnavailable, match="came back"):
        await waiting


async def test_a_script_is_sent_again_to_a_store_that_has_forgotten_it(link: Any, server: Any) -> None:
    echo = LuaScript("echo", "return ARGV[1]")
    came: list[bool] = []
    link.watch(lambda: came.append(True))
    assert await link.run(echo, "p", "one") == b"one"
    server.stop()
    server.start()
    await wait_until(lambda: came)
    assert await link.run(echo, "p", "two") == b"two"


async def test_a_store_that_is_gone_or_silent_is_named_when_patience_ends(link: Any, server: Any) -> None:
    server.freeze()
    try:
        with pytest.raises(StoreUnavailable, match="does not answer in time"):
            await link.call("PING", patience_s=0.5)
    finally:
        server.thaw()
    server.kill()
    with pytest.raises(StoreUnavailable, match=r"redis\.sock does not answer .*; start it, or correct the store URL"):
        await link.call("PING", patience_s=0.5)


async def test_no_password_shows_in_messages(tmp_path: Any) -> None:
    link = StoreConnection("redis://user:secret@127.0.0.1:1/0", patience_s=0.2)
    with pytest.raises(StoreUnavailable) as refused:
        await link.open()
    assert "secret" not in str(refused.value)
    assert "127.0.0.1:1" in str(refused.value)


async def test_a_store_that_wants_a_password_says_so(link: Any, server: Any) -> None:
    await link.call("CONFIG", "SET", "requirepass", "x")
    other = StoreConnection(server.url, patience_s=0.3)
    with pytest.raises(StoreUnavailable, match="password"):
        await other.open()


async def test_the_condition_of_a_store_is_told(link: Any) -> None:
    condition = await Store(link, "term").server_info()
    assert condition.fsync == "always"
    assert not condition.evicts
    await link.call("CONFIG", "SET", "maxmemory", "100mb")
    await link.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    await link.call("CONFIG", "SET", "appendfsync", "everysec")
    condition = await Store(link, "term").server_info()
    assert (condition.fsync, condition.evicts, condition.skips_fsync) == ("everysec", True, False)
    await link.call("CONFIG", "SET", "no-appendfsync-on-rewrite", "yes")
    await link.call("CONFIG", "SET", "appendfsync", "always")
    condition = await Store(link, "term").server_info()
    assert (condition.durable_after_s, condition.skips_fsync) == (30.0, True)


async def test_a_connection_that_is_cut_before_its_first_answer_is_given_up(
    server: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.store.dialer._CONNECT_S", 0.2)
    address, silent = tmp_path / "way.sock", []
    listening = await asyncio.start_unix_server(lambda _, writer: silent.append(writer), address)
    link = StoreConnection(f"unix://{address}", patience_s=10)
    opening = asyncio.create_task(link.open())
    await wait_until(lambda: silent, what="a connection that gets no answer")
    listening.close()
    address.unlink(missing_ok=True)
    address.symlink_to(server.socket)
    await opening
    await link.close()
    assert len(silent) == 1
    silent[0].close()


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
async def test_nothing_is_durable_while_an_fsync_does_not_end(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = StallingDisk(tmp_path)
    with monkeypatch.context() as patch:
        for name, value in disk.environment.items():
            patch.setenv(name, value)
        server = EmbeddedRedis(tmp_path / "slow", fsync="everysec").start()
    link = StoreConnection(server.url, patience_s=10)
    try:
        await link.open()
        assert (await Store(link, "term").server_info()).durable_after_s == 2.0
        disk.stall()
        await link.call("SET", "k", "1")
        waiting = asyncio.create_task(link.durable())
        await asyncio.wait([waiting], timeout=3.0)
        assert not waiting.done()
        disk.go_on()
        await waiting
    finally:
        await link.close()
        server.close()
