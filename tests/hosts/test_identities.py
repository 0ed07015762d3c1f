"""Who may do what from which host: certificates and tokens, not places in the network, decide."""

import json
from typing import Final

import pytest

from ebbtide.auth.roles import TABLE, Role
from tests.hosts.cluster import Cluster

#: What only a trainer may, at the coordinator and at the relay.
TRAINERS: Final = sorted(
    method for method, roles in TABLE.items() if roles == {Role.TRAINER} and not method.startswith("/ebbtide.v1.Loans/")
)  # loans are asked of a guard, on its own host
ANY: Final = "/ebbtide.v1.Runs/ListRuns"
NO_TLS: Final = {"EBBTIDE_TLS_CA": "", "EBBTIDE_TLS_CERT": "", "EBBTIDE_TLS_KEY": ""}
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]


@pytest.fixture
async def served(cluster: Cluster) -> Cluster:
    """A coordinator and a relay, each on its host."""
    await cluster.boot_services()
    return cluster


async def probe(cluster: Cluster, host: str, identity: str, *methods: str, **environment: str) -> dict[str, str]:
    """method -> the status of a call from that host by one that has that identity."""
    done = await cluster.ask(host, "-m", "tests.hosts.probe", *methods, identity=identity, **environment)
    assert done.returncode == 0, done.stderr
    answers: dict[str, str] = json.loads(done.stdout)
    return answers


async def test_a_worker_cannot_call_across_hosts_what_only_a_trainer_may(served: Cluster) -> None:
    assert len(TRAINERS) > 10
    assert set((await probe(served, "a", "a", *TRAINERS)).values()) == {"PERMISSION_DENIED"}
    welcome = await probe(served, "trainer", "trainer", *TRAINERS)
    assert not {"PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE"} & set(welcome.values())


async def test_a_trainers_token_does_not_help_who_has_a_workers_certificate(served: Cluster) -> None:
    stolen = served.identities.environment("trainer")["EBBTIDE_TOKEN_FILE"]
    answers = await probe(served, "a", "a", *TRAINERS, EBBTIDE_TOKEN_FILE=stolen)
    assert set(answers.values()) == {"PERMISSION_DENIED"}


async def test_who_shows_no_certificate_gets_no_answer(served: Cluster) -> None:
    answers = await probe(served, "user", "user", ANY, EBBTIDE_TLS_CERT="", EBBTIDE_TLS_KEY="")
    assert answers == {ANY: "UNAVAILABLE"}


async def test_who_insists_on_plaintext_gets_no_answer(served: Cluster) -> None:
    answers = await probe(served, "user", "user", ANY, **NO_TLS, EBBTIDE_ALLOW_INSECURE="true")
    assert answers == {ANY: "UNAVAILABLE"}


async def test_nobody_sends_a_token_to_another_host_in_plaintext(served: Cluster) -> None:
    done = await served.ask("user", "-m", "tests.hosts.probe", ANY, identity="user", **NO_TLS)
    assert done.returncode != 0
    assert "is not loopback and TLS is off" in done.stderr


@pytest.mark.parametrize("module", ["ebbtide.coordinator", "ebbtide.weight_relay"])
async def test_no_service_listens_to_other_hosts_in_plaintext(module: str, cluster: Cluster) -> None:
    name = module.rpartition("_")[2].rpartition(".")[2]
    listen = cluster.coordinator if name == "coordinator" else cluster.relay
    command = ("-m", module, "--server-listen", listen)
    done = await cluster.ask("control" if name == "coordinator" else "relay", *command, identity=name, **NO_TLS)
    assert done.returncode != 0
    assert "is not loopback and TLS is off" in done.stderr
