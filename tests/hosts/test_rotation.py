"""Certificates, tokens and the signing key are replaced in the middle of a run, and no program is started again."""

import shutil
import ssl
from pathlib import Path
from typing import Final

import pytest

from tests.hosts.cluster import SCRIPTED, Cluster
from tests.hosts.run import ShortRun
from tests.hosts.test_identities import ANY, probe
from tests.support.waiting import wait_until

_SHOWN: Final = """
import socket, ssl, sys
host, _, port = sys.argv[1].rpartition(":")
context = ssl.create_default_context(cafile=sys.argv[2])
context.load_cert_chain(sys.argv[3], sys.argv[4])
with context.wrap_socket(socket.create_connection((host, int(port)), 20), server_hostname=host) as connection:
    print(ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True)), end="")
"""
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(420)]


async def shown(cluster: Cluster, service: str) -> str:
    """The certificate that a service shows to a new connection from the user's host."""
    where = cluster.coordinator if service == "coordinator" else cluster.relay
    files = [str(cluster.identities.folder / name) for name in ("ca.pem", "user.pem", "user.key")]
    done = await cluster.ask("user", "-c", _SHOWN, where, *files, identity="user")
    assert done.returncode == 0, done.stderr
    return done.stdout


def issued(cluster: Cluster, name: str) -> str:
    first = (cluster.identities.folder / f"{name}.pem").read_text().partition("-----END CERTIFICATE-----")
    return ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(f"{first[0].strip()}\n{first[1]}\n"))


async def test_identities_are_rotated_in_the_middle_of_a_run(cluster: Cluster, run: ShortRun, tmp_path: Path) -> None:
    await cluster.boot(**SCRIPTED)
    run.submit(steps=40)
    await run.past(1)
    services = ("coordinator", "relay")
    former = {name: await shown(cluster, name) for name in services}
    token = shutil.copy(cluster.identities.folder / "user.token", tmp_path / "former.token")
    assert former == {name: issued(cluster, name) for name in services}

    cluster.identities.rotate()
    assert {name: await shown(cluster, name) for name in services} == {name: issued(cluster, name) for name in services}
    assert not set(former.values()) & {issued(cluster, name) for name in services}
    cluster.identities.retire()
    answers = await probe(cluster, "user", "user", ANY, EBBTIDE_TOKEN_FILE=str(token))
    assert answers == {ANY: "UNAUTHENTICATED"}
    assert await probe(cluster, "user", "user", ANY) == {ANY: "OK"}

    # Streams that were open go on as whom they were opened by; new ones have to show the new papers.
    attached = len(cluster.logged("coordinator", "attached"))
    cluster.network.cut("a")
    await wait_until(lambda: cluster.logged("coordinator", "lost", "suspected"), timeout=60, what="a is missed")
    cluster.network.mend("a")
    await wait_until(lambda: len(cluster.logged("coordinator", "attached")) > attached, timeout=90, what="a is back")
    assert run.step < run.steps, "all this happened while the run went on"
    await run.ended()
    assert all(process.running() for process in cluster.process.values())
