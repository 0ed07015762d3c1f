"""A gateway on a host of its own: mTLS to the coordinator, TLS to its clients, and answers that outlive a cut."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.fakes.scripted_engine import follow
from tests.hosts.agent import TOKENS
from tests.hosts.cluster import SCRIPT, SCRIPTED, Cluster
from tests.hosts.run import RUN, ShortRun
from tests.hosts.test_identities import ANY, TRAINERS, probe
from tests.support.waiting import wait_until

PROMPT: Final = [40, 41, 42]
pytestmark = [pytest.mark.hosts, pytest.mark.timeout(420)]


class Agent:
    """Started on the user's host by `ask`. Its environment has its key and the authority of the gateway, no more."""

    def __init__(self, cluster: Cluster, said: Path) -> None:
        self._cluster, self._said = cluster, said
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self) -> None:
        inherited = self._cluster.environment("user")
        environment = {name: value for name, value in inherited.items() if not name.startswith("EBBTIDE_")}
        environment["OPENAI_API_KEY"] = self._cluster.identities.agent_key(RUN)
        environment["SSL_CERT_FILE"] = str(self._cluster.identities.folder / "ca.pem")
        words = ("-m", "tests.hosts.agent", f"https://{self._cluster.gateway}", RUN, *map(str, PROMPT))
        with self._said.open("wb") as out:
            command = self._cluster.network.on("user", sys.executable, *words)
            self._process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)

    @property
    def ids(self) -> list[int]:
        """The tokens that it has."""
        lines = self._said.read_text().splitlines()
        return [token for line in lines if line.startswith("[") and line.endswith("]") for token in json.loads(line)]

    async def answered(self) -> list[int]:
        """Its tokens when it has ended, without an error."""
        process = self._process
        assert process is not None
        await wait_until(lambda: process.poll() is not None, timeout=120, interval=0.1, what="the end of the answer")
        assert process.returncode == 0, self._said.read_text()
        return self.ids

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def agent(cluster: Cluster, tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(cluster, tmp_path / "agent.out")
    try:
        yield agent
    finally:
        agent.close()


async def test_an_answer_continues_after_a_cut_between_gateway_and_coordinator(
    cluster: Cluster, run: ShortRun, agent: Agent
) -> None:
    await cluster.boot(**SCRIPTED)
    await cluster.serve_clients()
    run.submit(steps=40)  # it goes on for longer than the answer
    await run.past(1)
    agent.ask()
    await wait_until(lambda: agent.ids, timeout=60, what="the answer begins")
    cluster.network.cut("control")
    await wait_until(lambda: cluster.logged("a", "detached"), timeout=60, interval=0.1, what="a misses the coordinator")
    assert 0 < len(agent.ids) < TOKENS
    cluster.network.mend("control")
    assert await agent.answered() == [token for token, _ in follow(SCRIPT, PROMPT, TOKENS)]
    await run.ended()


async def test_a_gateway_and_its_clients_may_not_call_what_a_trainer_may(cluster: Cluster) -> None:
    await cluster.boot_services()
    assert set((await probe(cluster, "gateway", "gateway", *TRAINERS)).values()) == {"PERMISSION_DENIED"}
    key = cluster.directory / "agent.token"
    key.write_text(cluster.identities.agent_key(RUN))
    key.chmod(0o600)
    for host in ("user", "gateway"):  # with a certificate of its own role, an agent's key is none
        answers = await probe(cluster, host, host, ANY, EBBTIDE_TOKEN_FILE=str(key))
        assert answers == {ANY: "PERMISSION_DENIED"}
