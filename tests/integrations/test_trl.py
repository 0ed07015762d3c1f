"""TRL, as installed, against real services and vLLM's CPU build: `GRPOTrainer` learns through Ebbtide while workers and
the coordinator are killed, and TRL's client of a vLLM server is answered by a gateway.

One cluster serves all tests of this module, as engines take a minute to boot.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import pytest

from ebbtide.client import Client
from ebbtide.types.run import Run, RunStatus
from tests.chaos.cluster import FLUSH_TOKENS, TOKEN, Cluster
from tests.engine_config import engine_config
from tests.integrations.environments import made_environment, script, tail_of, variables
from tests.support.waiting import wait_until
from tests.tiny_model import save_tiny_model

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(900)]
_BOOT_S: Final = 300.0
_TRAINING_S: Final = 600.0
STEPS: Final = 20
PLAN: Final = {"steps": STEPS, "batch": 64, "group": 8, "length": 32, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def python() -> Path:
    return made_environment("trl", behind=True)


class Stand:
    """A cluster with two workers, of which a dead one is replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Cluster(folder)
        self.model = save_tiny_model(folder / "model", head=32)
        self._workers = 0

    async def boot(self) -> Client:
        (self.folder / "worker.toml").write_text(engine_config(512))
        client = await self.cluster.boot(workers=0)
        await self.worker()
        await self.worker()
        return client

    async def worker(self) -> None:
        self._workers += 1
        flags: dict[str, Any] = {"engine": "vllm", "model": self.model, "config": self.folder / "worker.toml"}
        await self.cluster.worker(f"w{self._workers}", slots=32, boot_s=_BOOT_S, **flags)

    @asynccontextmanager
    async def training(self, python: Path, **plan: Any) -> AsyncIterator["Training"]:
        made = Training(self, plan["run"])
        process = await made.begin(python, PLAN | plan)
        try:
            yield made
            assert await asyncio.wait_for(process.wait(), _TRAINING_S) == 0, tail_of(made.log)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


class Training:
    """One program that trains with TRL, and what it told."""

    def __init__(self, stand: Stand, run_id: str) -> None:
        self._stand, self.run_id = stand, run_id
        self.log = stand.folder / f"{run_id}.log"
        self._record = stand.folder / f"{run_id}.jsonl"

    async def begin(self, python: Path, plan: dict[str, Any]) -> asyncio.subprocess.Process:
        places = {"model": self._stand.model, "output": self._stand.folder / "out", "record": self._record}
        plan = plan | {name: str(path) for name, path in places.items()}
        with self.log.open("w") as log:
            return await asyncio.create_subprocess_exec(
                *(python, script("train_with_trl.py"), json.dumps(plan)),
                env=variables(self._stand.cluster),
                stdout=log,
                stderr=log,
            )

    def completions(self) -> list[dict[str, Any]]:
        """All that TRL's reward function got."""
        if not self._record.exists():
            return []
        return [json.loads(line) for line in self._record.read_text().splitlines() if line.endswith("}")]

    def rewards(self) -> list[float]:
        """The mean true reward of each step."""
        steps: dict[int, list[float]] = {}
        for one in self.completions():
            steps.setdefault(one["step"], []).append(one["reward"])
        return [fmean(rewards) for _, rewards in sorted(steps.items())]

    def generated(self) -> int:
        """Tokens that left the engines for this run."""
        return sum(one.generated for one in self._stand.cluster.ledger() if one.run_id == self.run_id)

    async def halfway(self, step: int) -> None:
        """Return while the rollouts of a step are generated."""
        await wait_until(lambda: len(self.rewards()) >= step, timeout=_TRAINING_S, what=f"step {step} of {self.run_id}")
        seen = self.generated()
        await wait_until(lambda: self.generated() > seen + 64 * 4, timeout=_TRAINING_S, what="a generation under way")

    def check_books(self, run: Run) -> None:
        """Every rollout and every token that TRL trained on is one of the coordinator's and of the workers' ledgers."""
        made, records = self.completions(), [one for one in self._stand.cluster.ledger() if one.run_id == self.run_id]
        assert len(made) == len({one["rollout_id"] for one in made}) == STEPS * 64
        assert (run.status, run.dropped) == (RunStatus.FINISHED, {})
        assert run.counters["trained"] == run.counters["submitted"] == len(made)
        tokens = Counter({one["rollout_id"]: len(one["tokens"]) for one in made})
        assert run.counters["tokens_stored"] == tokens.total()
        ends: dict[str, set[int]] = {name: set() for name in tokens}
        for record in records:
            ends[record.rollout_id].add(record.start + record.generated)
        assert all(tokens[name] in found for name, found in ends.items()), "an attempt of each ends with its last token"
        twice = sum(record.generated for record in records) - tokens.total()
        assert 0 <= twice <= FLUSH_TOKENS * (len(records) - len(made))
        assert {(one["step"] + 1, one["version"]) for one in made} == {(step, step) for step in range(1, STEPS + 1)}


async def test_grpo_learns_with_three_seeds_under_kills_and_not_from_shuffled_rewards(
    tmp_path: Path, python: Path
) -> None:
    stand = Stand(tmp_path)
    try:
        client = await stand.boot()
        trained: list[Training] = []
        async with stand.training(python, run="undisturbed", seed=0) as training:
            pass
        trained.append(training)
        async with stand.training(python, run="worker-killed", seed=1, correct=True) as training:
            await training.halfway(4)
            stand.cluster.kill("w1")
            await stand.worker()
        trained.append(training)
        async with stand.training(python, run="coordinator-killed", seed=2) as training:
            await training.halfway(4)
            stand.cluster.kill("coordinator")
            await stand.cluster.coordinator()
        trained.append(training)
        async with stand.training(python, run="shuffled", seed=0, control=True) as control:
            pass
        for one in (*trained, control):
            one.check_books(await client.run(one.run_id))
        killed = [one for one in stand.cluster.ledger() if one.run_id == "worker-killed"]
        assert any(one.start for one in killed), "no rollout of the killed worker went on elsewhere"
        ends = {one.run_id: (fmean(one.rewards()[:3]), fmean(one.rewards()[-3:])) for one in (*trained, control)}
        (tmp_path / "rewards.json").write_text(json.dumps(ends))
        for one in trained:
            first, last = ends[one.run_id]
            assert last >= first + 0.3, ends
        assert ends["shuffled"][1] <= ends["shuffled"][0] + 0.1, ends
    finally:
        await stand.cluster.close()


@pytest.fixture
def netrc(tmp_path: Path) -> Path:
    """The only way to give TRL's client a key."""
    path = tmp_path / "netrc"
    path.write_text(f"machine 127.0.0.1 login ebbtide password {TOKEN}\n")
    path.chmod(0o600)
    return path


async def test_trls_client_of_a_vllm_server_gets_the_policys_own_tokens_and_logprobs(
    tmp_path: Path, python: Path, netrc: Path
) -> None:
    from safetensors.numpy import load_file

    stand = Stand(tmp_path)
    cluster = stand.cluster
    try:
        (tmp_path / "worker.toml").write_text(engine_config(512))
        client = await cluster.boot(workers=0)
        await stand.worker()
        spec = {"name": "asked", "model": str(stand.model), "environment": {"name": "agents"}}
        await client.submit(spec | {"trainer": {"name": "external"}}, "asked")
        async with client.claim("asked") as lease:
            await lease.publish(load_file(stand.model / "model.safetensors"), step=0)
            head = cluster.process["coordinator"].address
            gateway = await cluster.start("gateway", "gateway", listen="127.0.0.1:0", coordinator=head, holder="g")
            plan = {"model": str(stand.model), "url": f"http://{gateway.address}"}
            with (tmp_path / "log").open("w") as log:
                asking = await asyncio.create_subprocess_exec(
                    *(python, script("ask_with_trl.py"), json.dumps(plan)),
                    env=variables(cluster, NETRC=str(netrc)),
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                )
                out, _ = await asyncio.wait_for(asking.communicate(), _BOOT_S)
            assert asking.returncode == 0, tail_of(tmp_path / "log")
            await lease.finish()
    finally:
        await cluster.close()
    told = json.loads(out.splitlines()[-1])
    assert (told["model"], told["world_size"], told["completions"], told["chats"]) == ("asked", 1, 9, 6)
    assert told["prompts_kept"]
    assert told["greedy_is_own"]
    assert max(told[name] for name in ("gap", "chat_gap", "teacher_gap")) <= 1e-3
    assert "no weight-transfer engine" in told["refused"]["communicator"]
    assert "structured_outputs" in told["refused"]["grammar"]
    assert "prompt_logprobs" in told["refused"]["alternatives"]
