"""The real services with roles: mTLS, signed tokens, and all of it replaced in the middle of a run."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from ebbtide.auth.roles import Role
from ebbtide.auth.security import ClientSecurity
from ebbtide.cli.credentials import certificates, signing_keys
from ebbtide.cli.credentials.certificates import write_file
from ebbtide.client import Client, Lease
from ebbtide.errors import PermissionDenied
from ebbtide.types.run import RunStatus
from tests.integration.client.test_real_services import SPEC, Cluster, rollouts

SERVERS = {"coordinator": Role.COORDINATOR, "relay": Role.RELAY}
CALLERS = {"worker": Role.WORKER, "trainer": Role.TRAINER, "user": Role.USER}


class Secured:
    """An authority, signing keys, and the files of every program of a cluster."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self._certs, self._keys = folder / "ca", folder / "keys"
        self._certify()
        signing_keys.make(self._keys)
        self._issue()
        proofs = {name: self._tls(name) for name in (*SERVERS, *CALLERS)}
        for name in SERVERS:
            proofs[name]["EBBTIDE_TOKEN_KEYS"] = str(self._keys / "tokens.pub")
        proofs["worker"]["EBBTIDE_TOKEN_FILE"] = str(self._keys / "worker.jwt")
        self.cluster = Cluster(folder, redis_url, proofs)

    def _certify(self) -> None:
        certificates.init(self._certs, 2)
        for name, role in (SERVERS | CALLERS).items():
            certificates.issue(self._certs, name, [role], ["127.0.0.1"] if name in SERVERS else [], 1)

    def _issue(self) -> None:
        for name, role in CALLERS.items():
            token = signing_keys.issue(self._keys, role, run_id="" if name == "worker" else "run-1", ttl_s=600, name="")
            write_file(self._keys / f"{name}.jwt", token.encode(), mode=0o600)

    def _tls(self, name: str) -> dict[str, str]:
        pair = {"CERT": self._certs / f"{name}.pem", "KEY": self._certs / f"{name}.key"}
        return {f"EBBTIDE_TLS_{key}": str(path) for key, path in {"CA": self._certs / "ca.pem", **pair}.items()}

    def replace(self) -> None:
        """All of it by what the former authority and the former key know nothing of."""
        for file in self._certs.iterdir():
            file.unlink()
        self._certify()
        signing_keys.rotate(self._keys)
        self._issue()
        signing_keys.retire(self._keys)

    def client(self, name: str) -> Client:
        tls = {key.removeprefix("EBBTIDE_").lower(): path for key, path in self._tls(name).items()}
        security = ClientSecurity(token_file=str(self._keys / f"{name}.jwt"), **tls)  # type: ignore[arg-type]
        cluster = self.cluster
        return Client(cluster.coordinator.address, cluster.relay.address, security=security, patience_s=30.0)


@pytest.fixture
async def secured(tmp_path: Path, redis_url: str) -> AsyncIterator[Secured]:
    made = Secured(tmp_path, redis_url)
    try:
        await made.cluster.start()
        yield made
    finally:
        made.cluster.close()


async def generate(lease: Lease, names: list[str], version: int) -> None:
    await lease.submit_rollouts(rollouts(names, version))
    missing = set(names)
    async for rollout in lease.finished():
        missing.discard(rollout.rollout_id)
        if not missing:
            break
    await lease.acknowledge(names)


async def test_a_run_goes_on_while_authority_certificates_keys_and_tokens_are_replaced(secured: Secured) -> None:
    async with secured.client("trainer") as trainer, secured.client("user") as user:
        with pytest.raises(PermissionDenied, match="another run"):
            await trainer.submit(SPEC, "run-2")
        await user.submit(SPEC, "run-1")
        with pytest.raises(PermissionDenied, match="ClaimRun is for gateway or trainer"):
            await user.acquire("run-1")
        async with trainer.claim("run-1") as lease:
            first = await lease.publish({"w": np.ones((3, 4), "f4")}, step=0)
            await generate(lease, ["r0", "r1"], first.version)
            await asyncio.to_thread(secured.replace)
            secured.cluster.coordinator.end(signal.SIGKILL)  # so that everybody has to connect again
            await secured.cluster.coordinator.start()
            second = await lease.publish({"w": np.zeros((3, 4), "f4")}, step=1, parent=first.version)
            await generate(lease, ["r2", "r3"], second.version)
            ended = await lease.finish()
        assert (ended.status, ended.counters["trained"]) == (RunStatus.FINISHED, 4)
        assert (await user.run("run-1")).status is RunStatus.FINISHED
