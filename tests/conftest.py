"""Fixtures for all tests: a redis-server process, flushed for each test that asks for it, a cluster of
processes, a folder of grants, and a tiny checkpoint; and which tests stay together when several processes run them."""

import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from xdist.scheduler import LoadFileScheduling

from tests.chaos.cluster import Cluster
from tests.support.redis_servers import EmbeddedRedis

# Children inherit what is ignored, and under `nohup make test &` that is SIGINT: interrupted ones would go on forever.
signal.signal(signal.SIGINT, signal.default_int_handler)


_DEMOS = ("tests/e2e/test_demo.py", "tests/e2e/test_demo_coserving.py")


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # a class without types
    """Tests of a file run in one process, as they share what it made for all; those of chaos are dealt out one by one.

    Two demos run in one process: the first makes a base model for both where there is none. That of agents has its own.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/chaos/"):
            return nodeid
        return _DEMOS[0] if nodeid.startswith(_DEMOS) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """A program that a test runs in this process may say which logs there are; the next test has all of them again."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


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


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Programs of their own, not booted yet."""
    cluster = Cluster(tmp_path)
    try:
        yield cluster
    finally:
        await cluster.close()


@pytest.fixture
def grant_dir() -> Iterator[Path]:
    """Where a guard and its workers meet: ours alone, and short, as a socket's path has to be."""
    with tempfile.TemporaryDirectory(prefix="ebb-") as made:
        path = Path(made) / "g"
        path.mkdir(0o700)
        yield path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 30 thousand parameters with the character tokenizer."""
    from tests.tiny_model import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
