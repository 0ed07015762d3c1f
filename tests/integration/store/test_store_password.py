"""The store of docker-compose.yml, started as it says there: only those who have the password's file reach it."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ebbtide.coordinator.service import dialled_url
from ebbtide.coordinator.settings import CoordinatorSettings
from ebbtide.errors import InvalidRequest, StoreUnavailable
from ebbtide.local_cluster.launcher import redis_binary
from ebbtide.store.connection import StoreConnection

SERVICE = yaml.safe_load((Path(__file__).parents[3] / "docker-compose.yml").read_text())["services"]["redis"]
PASSWORD = "pass/word@with:signs%"


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    """Of the compose file's Redis, with the container's paths in `tmp_path`, and no port."""
    (script,) = SERVICE["command"]
    for path in ("/tmp/redis.conf", "/var/lib/ebbtide/redis", "/secrets/store/password"):  # noqa: S108 - replaced
        assert path in script
        script = script.replace(path, str(tmp_path / Path(path).name))
    (tmp_path / "redis").mkdir()
    (tmp_path / "password").write_text(PASSWORD + "\n")
    socket = tmp_path / "redis.sock"
    script = script.replace("$$", "$").rstrip() + f" --port 0 --unixsocket {socket}"
    script = script.replace("/usr/bin/redis-server", str(redis_binary()))
    with subprocess.Popen([*SERVICE["entrypoint"], script], stdout=subprocess.DEVNULL) as server:
        yield socket
        server.terminate()


async def test_it_is_reached_with_the_password_of_the_file_alone(socket: Path, tmp_path: Path) -> None:
    url = f"unix://{socket}"
    settings = CoordinatorSettings(store_url=url, store_password_file=str(tmp_path / "password"))
    link = StoreConnection(dialled_url(settings), patience_s=10.0)
    await link.open()
    assert PASSWORD not in link.where
    await link.close()
    with pytest.raises(StoreUnavailable, match="needs another user or password"):
        await StoreConnection(url, patience_s=0.5).open()
    assert PASSWORD.encode() not in b"".join(path.read_bytes() for path in _command_lines())


def _command_lines() -> Iterator[Path]:
    return (path for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK))


def test_two_passwords_and_none_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "password"
    for content, url, why in (("", "redis://a/0", "is empty"), ("x", "redis://:y@a/0", "has a password already")):
        file.write_text(content)
        with pytest.raises(InvalidRequest, match=f"^store_password_file: .*{why}"):
            dialled_url(CoordinatorSettings(store_url=url, store_password_file=str(file)))


def test_the_user_and_all_sentinels_of_the_url_stay(tmp_path: Path) -> None:
    (file := tmp_path / "password").write_text("p@ss")
    url = "redis+sentinel://user@a:1,b:2/service/3?sentinel_password=x"
    found = dialled_url(CoordinatorSettings(store_url=url, store_password_file=str(file)))
    assert found == "redis+sentinel://user:p%40ss@a:1,b:2/service/3?sentinel_password=x"
