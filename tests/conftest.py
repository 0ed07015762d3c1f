"""Fixtures for all tests: one redis-server process per test session, flushed for each test that asks for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.testing import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A process, never a client: clients belong to the event loop of one test."""
    directory: Path = tmp_path_factory.mktemp("redis")
    server = EmbeddedRedis(directory)
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of an empty store."""
    assert redis_server.command("FLUSHALL") == b"+OK\r\n"
    return redis_server.url
