"""verifiers, as installed: an environment of several turns trains by one command, and its client of evaluations scores
at a gateway as at vLLM's own server."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import httpx
import pytest
from safetensors.numpy import load_file

from ebbtide.client import Client
from ebbtide.free_ports import free_port
from ebbtide.types.run import RunStatus
from tests.chaos.cluster import TOKEN, Cluster
from tests.engine_config import engine_config
from tests.integrations.environments import ROOT, made_environment, script, tail_of, variables
from tests.support.waiting import wait_until
from tests.tiny_model import save_tiny_model

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(900)]
_TIED: Final = ROOT / "tests" / "support" / "tied_program.py"
_BOOT_S: Final = 300.0
_TRAINING_S: Final = 600.0
STEPS: Final = 14
GROUPS, GROUP_SIZE, TURNS = 4, 8, 3
SPEC: Final = """
name = "letters"
model = "{model}"
output = "{output}"

[environment]
name = "verifiers:letters-game"
[environment.params.agent]
runtime = {{ type = "subprocess" }}

[sampling]
max_tokens = 32

[batch]
groups_per_step = {groups}
group_size = {group_size}
max_staleness = 1

[trainer]
steps = {steps}
learning_rate = 1e-2
permute_rewards = {control}
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return made_environment("verifiers")


def own_variables(cluster: Cluster, **further: str) -> dict[str, str]:
    """Of a program in verifiers' environment, which finds the test's environment too."""
    given = variables(cluster, **further)
    return given | {"PYTHONPATH": os.pathsep.join([given["PYTHONPATH"], script("")])}


class Stand:
    """A cluster with trainer, driver, gateway and workers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cluster = folder, Cluster(folder)
        self.model = save_tiny_model(folder / "model", head=32)
        (folder / "worker.toml").write_text(engine_config(512))

    async def boot(self, *, workers: int) -> Client:
        client = await self.cluster.boot(workers=0)
        for number in range(workers):
            await self.worker(f"w{number + 1}")
        await self.cluster.start("gateway", "gateway", listen="127.0.0.1:0", holder="g", coordinator=self._head)
        return client

    async def train(self) -> None:
        where: dict[str, Any] = {"coordinator": self._head, "relay": self.cluster.process["relay"].address}
        where["output_roots"] = self.folder / "output"
        await self.cluster.start("driver", "driver", holder="driver", **where)
        await self.cluster.start("trainer", "trainer", holder="trainer", threads=1, device="cpu", **where)

    async def worker(self, name: str) -> None:
        flags: dict[str, Any] = {"engine": "vllm", "model": self.model, "config": self.folder / "worker.toml"}
        await self.cluster.worker(name, slots=32, boot_s=_BOOT_S, **flags)

    @property
    def _head(self) -> str:
        return self.cluster.process["coordinator"].address

    @property
    def gateway(self) -> str:
        return f"http://{self.cluster.process['gateway'].address}"


@asynccontextmanager
async def playing(stand: Stand, python: Path, run_id: str, *, control: bool = False) -> AsyncIterator[Path]:
    """`python -m ebbtide.verifiers`, which ends with the run; its log."""
    spec, log = stand.folder / f"{run_id}.toml", stand.folder / f"{run_id}.log"
    values: dict[str, Any] = {"model": stand.model, "output": stand.folder / "output", "steps": STEPS}
    values |= {"groups": GROUPS, "group_size": GROUP_SIZE, "control": json.dumps(control)}
    spec.write_text(SPEC.format(**values))
    with log.open("w") as file:
        process = await asyncio.create_subprocess_exec(
            *(python, "-m", "ebbtide.verifiers", str(spec), "--gateway", stand.gateway, "--run-id", run_id),
            env=own_variables(stand.cluster),
            cwd=stand.folder,
            stdout=file,
            stderr=file,
        )
    try:
        yield log
        assert await asyncio.wait_for(process.wait(), _TRAINING_S) == 0, tail_of(log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def rewards(client: Client, run_id: str) -> list[float]:
    """Of each step."""
    return [event.values["reward"] async for event in client.watch(run_id) if event.kind == "step"]


async def check_books(stand: Stand, client: Client, run_id: str) -> int:
    """Every episode of the run was trained on once, and its turns are what the workers generated for it. Returns the
    attempts that were cut."""
    run = await client.run(run_id)
    assert (run.status, run.dropped) == (RunStatus.FINISHED, {}), run.message
    episodes = STEPS * GROUPS * GROUP_SIZE
    assert f"finished after {episodes} episodes" in tail_of(stand.folder / f"{run_id}.log")
    records = [one for one in stand.cluster.ledger() if one.run_id == run_id]
    assert len({one.rollout_id for one in records}) == episodes * TURNS
    return len(records) - episodes * TURNS


async def test_an_environment_of_several_turns_trains_by_one_command_though_a_worker_is_killed(
    tmp_path: Path, python: Path
) -> None:
    stand = Stand(tmp_path)
    try:
        client = await stand.boot(workers=2)
        await stand.train()

        def made_by(worker: str) -> int:
            return sum(one.generated for one in stand.cluster.ledger(worker))

        async def past(run_id: str, step: int) -> bool:
            runs = {run.run_id: run for run in await client.runs()}
            newest = runs[run_id].newest if run_id in runs else None
            return newest is not None and newest.step >= step

        async with playing(stand, python, "letters-1") as log:
            await wait_until(lambda: past("letters-1", 3), timeout=_TRAINING_S, what=f"step 3; {tail_of(log)}")
            seen = made_by("w1")
            await wait_until(lambda: made_by("w1") > seen + 100, timeout=_TRAINING_S, what="tokens of the worker")
            stand.cluster.kill("w1")
            await stand.worker("w3")
        async with playing(stand, python, "letters-2", control=True):
            pass
        trained, control = await rewards(client, "letters-1"), await rewards(client, "letters-2")
        assert await check_books(stand, client, "letters-1") > 0, (
            "nothing was generated at the worker when it was killed"
        )
        assert await check_books(stand, client, "letters-2") == 0
        (tmp_path / "rewards.json").write_text(json.dumps([trained, control]))
        assert fmean(trained[-3:]) >= fmean(trained[:3]) + 0.15, trained
        assert fmean(control[-3:]) <= fmean(control[:3]) + 0.1, control
    finally:
        await stand.cluster.close()


async def test_the_eval_client_scores_at_a_gateway_as_at_vllms_own_server(tmp_path: Path, python: Path) -> None:
    stand = Stand(tmp_path)
    cluster = stand.cluster
    try:
        client = await stand.boot(workers=1)
        spec = {"name": "asked", "model": str(stand.model), "environment": {"name": "agents"}}
        await client.submit(spec | {"trainer": {"name": "external"}}, "asked")
        async with client.claim("asked") as lease:
            await lease.publish(load_file(stand.model / "model.safetensors"), step=0)
            ours = await scores(python, cluster, f"{stand.gateway}/v1", "asked", tmp_path)
            await lease.finish()
        cluster.kill("w1")
        async with vllms_own_server(stand.model, tmp_path) as url:
            theirs = await scores(python, cluster, f"{url}/v1", str(stand.model), tmp_path)
    finally:
        await cluster.close()
    assert len(ours) == 16
    assert ours == theirs
    assert len({said for _, said in ours}) > 1, "all answers are the same"


async def scores(python: Path, cluster: Cluster, url: str, model: str, folder: Path) -> list[Any]:
    """Reward and texts of each task, played greedily."""
    plan = json.dumps({"url": url, "model": model})
    with (folder / "eval.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *(python, script("evaluate_with_verifiers.py"), plan),
            env=own_variables(cluster, GATEWAY_API_KEY=TOKEN),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        out, _ = await asyncio.wait_for(process.communicate(), _BOOT_S)
    assert process.returncode == 0, tail_of(folder / "eval.log")
    return [tuple(one) for one in json.loads(out.splitlines()[-1])]


@asynccontextmanager
async def vllms_own_server(model: Path, folder: Path) -> AsyncIterator[str]:
    port = free_port()
    flags = [
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "512",
    ]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": ""}
    with (folder / "vllm.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(_TIED), str(os.getpid()), sys.executable, "-m", "vllm.entrypoints.cli.main"),
            *("serve", str(model), *flags),
            env={**os.environ, **own},
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"

    async def healthy() -> bool:
        assert process.returncode is None, tail_of(folder / "vllm.log")
        async with httpx.AsyncClient() as http:
            try:
                return (await http.get(f"{url}/health")).status_code == 200
            except httpx.HTTPError:
                return False

    try:
        await wait_until(healthy, timeout=_BOOT_S, interval=0.5, what="vLLM's server")
        yield url
    finally:
        process.terminate()
        await process.wait()
