"""The SDK against the real coordinator, relay and a worker with the scripted engine, each its own process."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from ebbtide.auth.security import ClientSecurity
from ebbtide.client import Client
from ebbtide.errors import InvalidRequest, LeaseSuperseded, NotFound, NotReady
from ebbtide.types.rollout import FinishedRollout, FinishReason, RolloutRequest, SubmitOutcome
from ebbtide.types.run import RunEvent, RunStatus, Sampling
from ebbtide.types.tokens import pack_ids, unpack_tokens
from tests.fakes.scripted_settings import ScriptedSettings, engine_flags
from tests.fakes.service_process import PROOF, TOKEN, ServiceProcess
from tests.support.waiting import wait_until

SPEC: dict[str, Any] = {
    "name": "own",
    "model": "model",
    "environment": {"name": "none"},
    "sampling": {"max_tokens": 12},
}


class Cluster:
    def __init__(
        self,
        directory: Path,
        redis_url: str,
        proofs: Mapping[str, Mapping[str, str]] | None = None,
        *,
        script: ScriptedSettings = ScriptedSettings(vocab_size=64, step_s=0.005),  # noqa: B008 - it is frozen
    ) -> None:
        self._directory, self._proofs, self._script = directory, proofs or {}, script
        flags = ("--store-url", redis_url, "--lease-ttl-s", "1.5", "--recover-grace-s", "1")
        self.coordinator = ServiceProcess("coordinator", directory, *flags, proof=self._proof("coordinator"))
        data = ("--data-dir", str(directory / "relay"))
        self.relay = ServiceProcess("weight_relay", directory, *data, proof=self._proof("relay"))
        self.worker: ServiceProcess | None = None

    def _proof(self, name: str) -> Mapping[str, str]:
        return self._proofs.get(name, PROOF)

    async def start(self) -> None:
        await asyncio.gather(self.coordinator.start(), self.relay.start())
        flags = ["--coordinator", self.coordinator.address, "--relay", self.relay.address]
        flags += ["--model", str(self._directory), "--slots", "16"]
        flags += engine_flags(self._script)
        self.worker = ServiceProcess(
            "rollout_worker", self._directory, *flags, listens=False, proof=self._proof("worker")
        )
        await self.worker.start()

    def close(self) -> None:
        for service in (self.worker, self.relay, self.coordinator):
            if service is not None:
                service.end()


@pytest.fixture
async def cluster(tmp_path: Path, redis_url: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path, redis_url)
    try:
        await cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
async def real(cluster: Cluster) -> AsyncIterator[Client]:
    security = ClientSecurity(token=TOKEN)
    async with Client(cluster.coordinator.address, cluster.relay.address, security=security, patience_s=20.0) as client:
        yield client


def rollouts(names: list[str], version: int, max_tokens: int = 12) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            rollout_id=name,
            group_id="g",
            episode_id=name,
            prompt_ids=pack_ids([5, 6, 7]),
            sampling=Sampling(max_tokens=max_tokens),
            min_version=version,
        )
        for name in names
    ]


async def test_a_trainer_of_ones_own_runs_from_submit_to_finish(real: Client) -> None:
    run = await real.submit(SPEC, "run-1")
    assert await real.submit(SPEC, "run-1") == run or run.status is RunStatus.PENDING
    names = [f"r{i}" for i in range(12)]
    async with real.claim("run-1") as lease:
        version = await lease.publish({"w": np.ones((3, 4), "f4")}, step=0)
        assert await lease.submit_rollouts(rollouts(names, version.version)) == [SubmitOutcome.ACCEPTED] * 12
        assert await lease.submit_rollouts(rollouts(names[:1], version.version)) != [SubmitOutcome.ACCEPTED]
        finished: dict[str, Any] = {}
        async for rollout in lease.finished():
            finished[rollout.rollout_id] = rollout
            if len(finished) == 12:
                break
        for rollout in finished.values():
            tokens = unpack_tokens(rollout.tokens)
            assert (rollout.reason, len(tokens), set(tokens["version"])) == (FinishReason.LENGTH, 12, {1})
        chunks = [chunk async for chunk in real.stream_tokens("run-1", "r3", offset=4)]
        assert b"".join(chunk.tokens for chunk in chunks) == finished["r3"].tokens[48:]
        with pytest.raises(NotReady, match="neither trained nor dropped"):
            await lease.finish()
        await lease.acknowledge(names[:10])
        await lease.acknowledge(names[10:], "too_short")
        await lease.report([RunEvent(kind="step", key="0", values={"reward": 0.5})])
        ended = await lease.finish()
    assert (ended.status, ended.counters["trained"], ended.dropped) == (RunStatus.FINISHED, 10, {"too_short": 2})
    events = [event async for event in real.watch("run-1")]
    assert [event.values for event in events if event.kind == "step"] == [{"reward": 0.5}]

    async def told() -> bool:
        (worker,) = await real.workers()
        return worker.tokens_generated == 144

    await wait_until(told, what="the worker's heartbeat")


async def test_sigkill_of_the_coordinator_is_not_noticed_by_a_trainer(real: Client, cluster: Cluster) -> None:
    await real.submit(SPEC, "run-1")
    names = [f"r{i}" for i in range(40)]
    seen: list[str] = []
    async with real.claim("run-1") as lease:
        version = await lease.publish({"w": np.ones(3, "f4")}, step=0)
        await lease.submit_rollouts(rollouts(names, version.version, max_tokens=40))

        async def read() -> None:
            async for rollout in lease.finished():
                assert len(unpack_tokens(rollout.tokens)) == 40
                seen.append(rollout.rollout_id)

        reader = asyncio.create_task(read())
        await wait_until(lambda: len(seen) >= 3, timeout=20, what="the first rollouts")
        cluster.coordinator.end(signal.SIGKILL)
        acknowledge = asyncio.create_task(lease.acknowledge(seen[:3]))
        await cluster.coordinator.start()
        await acknowledge
        await wait_until(lambda: len(seen) >= 40, timeout=30, what="all rollouts")
        assert sorted(seen) == sorted(names)
        reader.cancel()
        await lease.acknowledge(names)
        assert (await lease.finish()).counters["trained"] == 40


async def test_a_superseded_trainer_can_do_nothing(real: Client, cluster: Cluster) -> None:
    await real.submit(SPEC, "run-1")
    async with real.claim("run-1", holder="one") as first:
        with pytest.raises(NotReady, match="held by one"):
            await real.acquire("run-1", holder="another", wait=False)
        async with real.claim("run-1", holder="one") as second:
            await wait_until(first.lost.is_set, what="the loss of the first lease")
            for call in (first.submit_rollouts(rollouts(["r"], 0)), first.publish({"w": np.ones(3)}, step=0)):
                with pytest.raises(LeaseSuperseded):
                    await call
            assert await second.submit_rollouts(rollouts(["r"], 0)) == [SubmitOutcome.ACCEPTED]
            await second.cancel_rollouts(["r"])
            await second.finish()


async def test_refusals_name_the_field(real: Client) -> None:
    with pytest.raises(NotFound, match="no run nowhere"):
        await real.run("nowhere")
    await real.submit(SPEC, "run-1")
    async with real.claim("run-1") as lease:
        good, bad = rollouts(["a", "b"], 0)
        bad = msgspec.structs.replace(bad, prompt_ids=pack_ids([64]))  # the engine's vocabulary ends at 63
        with pytest.raises(InvalidRequest, match=r"rollouts\[1\]\.prompt_ids"):
            await lease.submit_rollouts([good, bad])
    assert (await real.cancel("run-1")).status is RunStatus.CANCELLED


TINY_MODEL = """
import sys
from transformers import Qwen3Config, Qwen3ForCausalLM
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
config = Qwen3Config(vocab_size=64, head_dim=8, tie_word_embeddings=False, **sizes)
Qwen3ForCausalLM(config).save_pretrained(sys.argv[1])
"""


async def test_the_example_trainer_trains_and_finishes(real: Client, cluster: Cluster, tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "bring_your_own_trainer.py"
    addresses = {"EBBTIDE_COORDINATOR": cluster.coordinator.address, "EBBTIDE_RELAY": cluster.relay.address}
    environment = {**os.environ, **addresses, "EBBTIDE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    model = str(tmp_path / "model")
    for command in (["-c", TINY_MODEL, model], [str(example), "--model", model, "--steps", "2"]):
        run = await asyncio.create_subprocess_exec(
            sys.executable, *command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, errors = await run.communicate()
        assert run.returncode == 0, errors.decode()
    assert b"64 of 64 rollouts trained" in out
    (ended,) = await real.runs()
    assert (ended.status, ended.newest.version if ended.newest else 0) == (RunStatus.FINISHED, 3)
    _, tensors = await real.fetch_weights(ended.run_id)
    assert tensors["lm_head.weight"].shape == (64, 16)


async def test_the_trainer_of_the_readme_trains_and_finishes(real: Client, cluster: Cluster) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[3] / "README.md").read_text(), re.DOTALL)
    weights, versions = np.zeros(3, np.float32), list[set[int]]()

    async def collect(
        finished: AsyncIterator[FinishedRollout], wanted: set[str]
    ) -> tuple[list[FinishedRollout], list[FinishedRollout]]:
        found = dict[str, FinishedRollout]()
        while found.keys() != wanted:
            rollout = await anext(finished)
            found[rollout.rollout_id] = rollout
        return list(found.values()), []

    def train(found: list[FinishedRollout]) -> None:
        versions.append({int(version) for one in found for version in unpack_tokens(one.tokens)["version"]})
        weights[:] += 1

    def connect() -> Client:
        return Client(cluster.coordinator.address, cluster.relay.address, security=ClientSecurity(token=TOKEN))

    def requests(step: int, version: int) -> list[RolloutRequest]:
        return rollouts([f"s{step}.{number}" for number in range(4)], version)

    names: dict[str, Any] = {"Client": connect, "spec": SPEC, "steps": 2, "requests": requests, "collect": collect}
    names |= {"asyncio": asyncio, "train": train, "model": SimpleNamespace(state_dict=lambda: {"w": weights})}
    exec(f"async def run():\n{textwrap.indent(code, '    ')}", names)  # noqa: S102 - the page is ours
    await names["run"]()
    (ended,) = await real.runs()
    assert (ended.status, ended.counters["trained"]) == (RunStatus.FINISHED, 8)
    assert versions == [{1}, {2}]
    _, tensors = await real.fetch_weights(ended.run_id)
    assert bytes(tensors["w"].data) == np.full(3, 2, np.float32).tobytes()
