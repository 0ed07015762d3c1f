"""The embedded redis-server keeps what it acknowledged, and leaves nothing behind."""

import os
from pathlib import Path

import psutil
import pytest

from ebbtide.errors import StoreUnavailable
from ebbtide.local_cluster.launcher import redis_command
from tests.support.redis_servers import EmbeddedRedis
from tests.support.waiting import wait_until


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "r") as server:
        assert server.command("SET", "key", "value ü") == b"+OK\r\n"
        first = server.pid
        server.kill()
        with pytest.raises(StoreUnavailable, match="not running"):
            _ = server.pid
        server.start()
        assert server.pid != first
        assert server.command("GET", "key") == b"$8\r\nvalue \xc3\xbc\r\n"


async def test_a_frozen_server_answers_again_after_the_thaw() -> None:
    with EmbeddedRedis() as server:
        server.freeze()
        await wait_until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_STOPPED)
        server.thaw()
        assert server.command("PING") == b"+PONG\r\n"


def test_closing_leaves_neither_process_nor_directory() -> None:
    with EmbeddedRedis() as server:
        pid, directory = server.pid, server.directory
        assert server.socket.exists()
    assert not psutil.pid_exists(pid)
    assert not directory.exists()


def test_a_long_directory_gets_a_socket_that_fits(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / ("d" * 120)) as server:
        assert len(str(server.socket)) < 100
        assert server.command("PING") == b"+PONG\r\n"
        kept = server.socket.parent
    assert not kept.exists()
    assert (tmp_path / ("d" * 120)).exists()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    directory = tmp_path / "r"
    directory.mkdir()
    (directory / "appendonly.aof").write_bytes(b"this is no append-only file" * 10)
    with pytest.raises(StoreUnavailable, match=r"did not start:(.|\n)*Bad file format"):
        EmbeddedRedis(directory).start()


def test_it_listens_on_no_port_and_syncs_every_write(tmp_path: Path) -> None:
    command = redis_command(tmp_path, tmp_path / "s")
    assert command[command.index("--port") + 1] == "0"
    assert command[command.index("--appendfsync") + 1] == "always"
    assert os.access(command[0], os.X_OK)


def test_the_fixture_hands_out_an_empty_store(redis_url: str, redis_server: EmbeddedRedis) -> None:
    assert redis_url == redis_server.url
    assert redis_server.command("DBSIZE") == b":0\r\n"
