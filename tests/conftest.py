"""Fixtures for all tests: a redis-server process, flushed for each test that asks for it, a folder of grants, and a
tiny checkpoint; and which tests stay together when several processes run them."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.testing import EmbeddedRedis

# Children inherit what is ignored, and `nohup make test &` has SIGINT ignored: tests that interrupt one would wait forever.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a fixture of their module or of a module's session run in one process, which makes it once."""
    for item in items:
        info = getattr(item, "_fixtureinfo", None)
        definitions = [one for found in info.name2fixturedefs.values() for one in found] if info else []
        if any(one.scope == "module" or (one.scope == "session" and one.baseid.endswith(".py")) for one in definitions):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


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
