"""Runs real redis-servers, their replicas and Sentinels for tests.

Invariant: the data lies in `directory` and survives `stop`, `kill` and a new `start`. Each server is a child process,
which the owner of the object ends.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from ebbtide.free_ports import free_port
from ebbtide.local_cluster.launcher import redis_binary, redis_command
from tests.support.server_process import ServerProcess

#: A unix socket's path must fit into 108 bytes.
_MAX_SOCKET_PATH: Final = 100


class EmbeddedRedis(ServerProcess):
    """`url` is for `redis.asyncio.from_url`. With `tcp`, which replicas need of their primary, it has a `port`, too.

    `replica_of` holds for the first start: a restarted server is a primary until a Sentinel changes its role.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        fsync: str = "always",
        tcp: bool = False,
        replica_of: "EmbeddedRedis | None" = None,
        options: dict[str, str] | None = None,
        tied: bool = False,
    ) -> None:
        self._temporary = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="ebbtide-redis-"))
        self.directory.mkdir(parents=True, exist_ok=True)
        self.socket = self.directory / "redis.sock"
        self._short: Path | None = None
        if len(str(self.socket)) > _MAX_SOCKET_PATH:
            self._short = Path(tempfile.mkdtemp(prefix="ebb-"))
            self.socket = self._short / "redis.sock"
        super().__init__(self.socket, self.directory / "redis.log", tied=tied)
        self.port = free_port() if tcp or replica_of else 0
        self._fsync, self._options, self._replica_of = fsync, options or {}, replica_of

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def journal(self) -> Path:
        """Its append-only file."""
        return self.directory / "appendonly.aof"

    def come_back(self, *, knowing: int) -> None:
        """Kill it and restart it with the first `knowing` bytes of its journal, as if no more had been synced."""
        self.kill()
        os.truncate(self.journal, knowing)
        self.start()

    def info(self, name: str) -> str:
        """One value of INFO; empty if there is none of this name."""
        try:
            said = self.command("INFO")
        except ConnectionError:  # a Sentinel that changes a server's role ends its connections
            said = self.command("INFO")
        for line in said.decode().splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2]
        return ""

    def _command_line(self) -> list[str]:
        options: dict[str, str | list[str]] = {
            "repl-diskless-sync": "yes",
            "repl-diskless-sync-delay": "0",
            **self._options,
        }
        if self._replica_of is not None:
            options["replicaof"] = ["127.0.0.1", str(self._replica_of.port)]
            self._replica_of = None
        return redis_command(self.directory, self.socket, fsync=self._fsync, port=self.port, options=options)

    def close(self) -> None:
        """Kill it, and delete its temporary folders."""
        self.kill()
        for path in (self._short, self.directory if self._temporary else None):
            if path:
                shutil.rmtree(path, ignore_errors=True)


class EmbeddedSentinel(ServerProcess):
    """Watches a primary and its replicas, and promotes a replica when the primary was silent for `down_after_s`. It
    rewrites its configuration file.

    Start it once the replicas follow. `url` names the store by way of this Sentinel.
    """

    SERVICE: Final = "ebbtide"

    def __init__(self, directory: Path, primary: EmbeddedRedis, *, down_after_s: float = 1.0, quorum: int = 1) -> None:
        self.port = free_port()
        super().__init__(self.port, directory / "sentinel.log")
        directory.mkdir(parents=True, exist_ok=True)
        self._configuration = directory / "sentinel.conf"
        lines = (
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {directory}",
            f"sentinel monitor {self.SERVICE} 127.0.0.1 {primary.port} {quorum}",
            f"sentinel down-after-milliseconds {self.SERVICE} {round(down_after_s * 1000)}",
            f"sentinel failover-timeout {self.SERVICE} {round(down_after_s * 5000)}",
        )
        self._configuration.write_text("\n".join(lines) + "\n")

    def _command_line(self) -> list[str]:
        return [str(redis_binary()), str(self._configuration), "--sentinel"]

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.port}/{self.SERVICE}"
