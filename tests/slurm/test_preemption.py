"""The two jobs of deploy/slurm on a real Slurm: a preempted worker hands over, is requeued and comes back."""

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.cli.credentials import host_papers
from ebbtide.client import Client
from ebbtide.free_ports import free_port
from ebbtide.ledger import AttemptRecord, read_ledger
from ebbtide.types.run import RunStatus
from tests.fakes.scripted_settings import ScriptedSettings, engine_settings
from tests.slurm.controller import PROGRAMS, Slurm
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
ROOT: Final = Path(__file__).parents[2]
FILES: Final = ROOT / "deploy" / "slurm"
RUN: Final = "r"
#: The flush window of both workers.
FLUSH_TOKENS: Final = 8
STEPS, GROUPS, GROUP_SIZE = 60, 4, 4
SCRIPT: Final = ScriptedSettings(step_s=0.05, vocab_size=100, mean_length=96)
_PATIENCE_S: Final = 400.0


class Home:
    """The folder that all nodes share, as docs/deploy/slurm.md has it made."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        for name in ("models", "ledgers"):
            (folder / name).mkdir(parents=True)
        shutil.copytree(model, folder / "models" / "base")
        (folder / "venv").symlink_to(sys.prefix)
        papers = host_papers.parse_hosts(["localhost=coordinator,relay,trainer", "worker=worker", "login=operator"])
        host_papers.lay_out(folder / "authority", papers)
        (folder / "authority" / "hosts").rename(folder / "keys")
        self._coordinator, self._relay = f"localhost:{free_port()}", f"localhost:{free_port()}"
        self._write(
            "cluster.env",
            EBBTIDE_COORDINATOR=self._coordinator,
            EBBTIDE_RELAY=self._relay,
            EBBTIDE_MODEL_ROOTS="$EBBTIDE_HOME/models,$EBBTIDE_HOME/runs",
            EBBTIDE_OUTPUT_ROOTS="$EBBTIDE_HOME/runs",
            EBBTIDE_COORDINATOR_HEARTBEAT_TIMEOUT_S=15,  # for a busy machine
            EBBTIDE_TRAINER_DEVICE="cpu",
            EBBTIDE_TRAINER_THREADS=1,
            EBBTIDE_TRAINER_KEEP_CHECKPOINTS=99,
        )
        engine = {f"EBBTIDE_ROLLOUT_WORKER_{name.upper()}": text for name, text in engine_settings(SCRIPT).items()}
        self._write(
            "worker.env",
            **engine,
            EBBTIDE_ROLLOUT_WORKER_SLOTS=32,
            EBBTIDE_ROLLOUT_WORKER_FLUSH_TOKENS=FLUSH_TOKENS,
            EBBTIDE_ROLLOUT_WORKER_FLUSH_INTERVAL_MS=40,
            EBBTIDE_ROLLOUT_WORKER_MIRROR_DIR="",  # as if each worker had a node of its own
            EBBTIDE_ROLLOUT_WORKER_COUNTER_FILE="$EBBTIDE_HOME/ledgers/$SLURM_ARRAY_TASK_ID",
        )
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        #: What the jobs get from who submits them.
        self.environment = {"EBBTIDE_HOME": str(folder), "PYTHONPATH": os.pathsep.join(paths)}

    def client(self) -> Client:
        """Of somebody at the login node."""
        papers = self.folder / "keys" / "login"
        security = ClientSecurity(
            tls_ca=str(papers / "ca.pem"),
            tls_cert=str(papers / "admin.pem"),
            tls_key=str(papers / "admin.key"),
            token_file=str(papers / "admin.token"),
        )
        return Client(self._coordinator, self._relay, security=security, patience_s=120.0)

    def ledger(self, task: int) -> list[AttemptRecord]:
        """What the worker of this task generated in all its lives, as it counted it itself."""
        path = self.folder / "ledgers" / str(task)
        return read_ledger(path) if path.exists() else []

    def consumed(self) -> Counter[str]:
        """How often the trainer trained on each episode."""
        found: Counter[str] = Counter()
        for path in (self.folder / "runs" / RUN / "checkpoints").glob("step-*/trainer/state.json"):
            found.update(item["episode_id"] for item in json.loads(path.read_text())["training"]["consumed"])
        return found

    def spec(self) -> dict[str, Any]:
        return {
            "name": "short",
            "model": str(self.folder / "models" / "base"),
            "output": str(self.folder / "runs"),
            "environment": {"name": "number_guessing", "params": {"max_turns": 2}},
            "sampling": {"max_tokens": 24, "stop_token_ids": [1]},
            "batch": {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "max_staleness": 1},
            "trainer": {"steps": STEPS, "checkpoint_every": 4},
        }

    def _write(self, name: str, **settings: object) -> None:
        """A variable whose text has quotes of its own is JSON, in which nothing is to be expanded."""
        quoted = {key: f"'{text}'" if '"' in str(text) else f'"{text}"' for key, text in settings.items()}
        (self.folder / name).write_text("".join(f"{key}={text}\n" for key, text in quoted.items()))


@pytest.fixture
def home(tmp_path: Path, tiny_model: Path) -> Home:
    return Home(tmp_path / "home", tiny_model)


@pytest.fixture
def slurm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Slurm]:
    """With jobs of its own folder."""
    if os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)):
        pytest.skip("a Slurm of its own needs root and Debian's packages slurmctld, slurmd, slurm-client and munge")
    slurm = Slurm(tmp_path / "slurm", grace_s=request.param)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.close()


@pytest.mark.parametrize("slurm", [60, 0], ids=["notice", "sigterm"], indirect=True)
async def test_a_preempted_worker_hands_over_is_requeued_and_comes_back(slurm: Slurm, home: Home) -> None:
    control = slurm.submit(str(FILES / "control.sbatch"), environment=home.environment)
    workers = slurm.submit(str(FILES / "workers.sbatch"), environment=home.environment)
    async with home.client() as client:
        await client.submit(home.spec(), RUN)
        await wait_until(lambda: all(map(home.ledger, (0, 1))), timeout=_PATIENCE_S, what="both workers generate")
        urgent = slurm.submit("--partition=reserved", "--cpus-per-task=4", "--wrap=sleep 5")

        def requeued() -> list[int]:
            return [task for task in (0, 1) if slurm.state(f"{workers}_{task}").get("Restarts") == "1"]

        (task,) = await wait_until(requeued, timeout=180, interval=0.5, what="a requeued worker")
        made = len(home.ledger(task))
        await wait_until(
            lambda: slurm.state(urgent)["JobState"] == "COMPLETED", timeout=180, interval=0.5, what="the urgent job"
        )
        await wait_until(lambda: len(home.ledger(task)) > made, timeout=_PATIENCE_S, interval=0.2, what="it comes back")
        assert slurm.state(f"{workers}_{task}")["JobState"] == "RUNNING"
        assert slurm.state(f"{workers}_{1 - task}")["Restarts"] == "0"
        events = [event async for event in client.watch(RUN)]
        run = await client.run(RUN)
    assert '"drained"' in (slurm.folder / f"ebbtide-worker-{workers}-{task}.log").read_text()
    assert slurm.state(control)["Restarts"] == "0"

    assert run.status is RunStatus.FINISHED, run.message
    assert not run.dropped
    assert sum(event.kind == "version" for event in events) == STEPS + 1
    episodes = STEPS * GROUPS * GROUP_SIZE
    trained = home.consumed()
    assert set(trained.values()) == {1}
    assert len(trained) == episodes
    assert run.counters["submitted"] == run.counters["trained"] >= episodes
    records = home.ledger(0) + home.ledger(1)
    assert any(record.start for record in records), "rollouts that were handed over went on from their stored tokens"
    assert sum(record.generated for record in records) == run.counters["tokens_stored"], "no token was generated twice"
