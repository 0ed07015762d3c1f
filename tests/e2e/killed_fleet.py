"""A cluster with real engines and a trainer of its own process, and runs on it whose every token is compared with what
a fresh engine says.

Invariant: `living` are the workers that were booted and not killed since, two at most: w1 and w2. One trainer lives.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ebbtide.client import Client, Lease
from ebbtide.free_ports import free_port
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import TokenArray, pack_ids, unpack_tokens
from tests.chaos.cluster import TOKEN, Cluster
from tests.e2e.killed_versions import LENGTH, PROMPTS, Policy, Said
from tests.engine_config import engine_config
from tests.fakes.links import Direction, Way
from tests.support.waiting import wait_until

#: The machine may be busy with much else.
PATIENCE_S: Final = 120.0
CLOSE: Final = 1e-4
_SITE: Final = "far"


class Trainer:
    """The process of `killed_trainer`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, cluster: Cluster) -> "Trainer":
        relay = await cluster.route("trainer", "relay")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.e2e.killed_trainer", cluster.process["coordinator"].address, relay),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "EBBTIDE_TOKEN": TOKEN, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        return cls(process)

    def send(self, run_id: str, checkpoint: Path) -> None:
        """Have it publish the checkpoint's weights as the run's next version."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([run_id, str(checkpoint / "model.safetensors")]).encode() + b"\n")

    async def report(self) -> dict[str, Any]:
        """How a version was published, once it is announced."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE_S)
        assert line, "the trainer ended"
        report: dict[str, Any] = json.loads(line)
        return report

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class Fleet:
    """Made by `boot`. `patch_bytes`: what a patch from the first to the second version takes on its way."""

    def __init__(self, cluster: Cluster, policy: Policy, said: dict[Path, Said]) -> None:
        self.cluster, self.policy, self.said = cluster, policy, said
        self.living: list[str] = []
        self.patch_bytes = 0
        self._port = free_port()
        self._engine = cluster.directory / "worker.toml"

    async def boot(self) -> None:
        self._engine.write_text(engine_config(512))
        self.cluster.routed = True
        self.client: Client = await self.cluster.boot(workers=0)
        self.trainer = await Trainer.start(self.cluster)
        async with self.run("measured") as run:  # no worker has a part in it
            assert (await run.publish(self.policy.base))["kind"] == "keyframe"
            report = await run.publish(self.policy.beside)
            assert report["kind"] == "patch"
            self.patch_bytes = report["bytes_sent"]

    async def again(self) -> None:
        """Another trainer."""
        await self.trainer.kill()
        self.trainer = await Trainer.start(self.cluster)

    async def have(self, *names: str) -> None:
        """Have these workers alive."""
        for name in names:
            if name not in self.living:
                await self.worker(name)

    async def worker(self, name: str) -> None:
        """Boot a worker. w1 serves others of its site, over a way of its own."""
        flags: dict[str, Any] = {
            "engine": "vllm",
            "model": self.policy.base,
            "config": self._engine,
            "site": _SITE,
            "mirror_dir": self.cluster.directory / f"mirrors-{name}",  # as if each were a host
            "pull_patience_s": PATIENCE_S,
            "boot_s": 180.0,
        }
        if name == "w1":
            if ("readers", "w1") not in self.cluster.ways:
                self.cluster.ways["readers", "w1"] = await Way.open(f"127.0.0.1:{self._port}")
            advertised = self.cluster.ways["readers", "w1"].address
            flags |= {"peer_listen": f"127.0.0.1:{self._port}", "peer_advertise": advertised}
        await self.cluster.worker(name, **flags)
        self.living.append(name)

    def kill(self, worker: str) -> None:
        self.cluster.kill(worker)
        self.living.remove(worker)

    def back(self, caller: str, service: str) -> Direction:
        return self.cluster.ways[caller, service].back

    def cut(self, direction: Direction) -> None:
        """Let half of the second version through from now on, and no more."""
        direction.limit = direction.passed + self.patch_bytes // 2

    @contextlib.asynccontextmanager
    async def run(self, run_id: str) -> AsyncIterator["Run"]:
        """A run whose rollouts are submitted here, and whose trainer is the process."""
        spec = {"name": "killed", "model": str(self.policy.base), "environment": {"name": "none"}}
        await self.client.submit(spec, run_id)
        async with self.client.claim(run_id, "driver", holder="test") as lease:
            yield Run(self, lease)
            await self.client.cancel(run_id)

    async def close(self) -> None:
        await self.trainer.kill()


class Run:
    def __init__(self, fleet: Fleet, lease: Lease) -> None:
        self.fleet, self.run_id = fleet, lease.run_id
        self._lease = lease
        self._asked = 0

    async def publish(self, checkpoint: Path) -> dict[str, Any]:
        self.fleet.trainer.send(self.run_id, checkpoint)
        return await self.fleet.trainer.report()

    async def begin(self, *workers: str) -> None:
        """Publish version 1, and see it served; these workers have it then."""
        assert (await self.publish(self.fleet.policy.first))["version"]["version"] == 1
        await self.says(1, self.fleet.policy.first)
        for name in workers:
            await self.has(name, 1)

    async def says(self, version: int, checkpoint: Path) -> None:
        """What rollouts of the version alone are is what a fresh engine says with the checkpoint."""
        tokens = await self.ended(await self.submit(PROMPTS, version=version))
        assert {int(label) for one in tokens for label in one["version"]} == {version}
        said, wanted = Said.of(tokens), self.fleet.said[checkpoint]
        assert said.ids == wanted.ids, f"version {version} of {self.run_id}"
        assert said.gap(wanted) <= CLOSE, f"version {version} of {self.run_id}"

    async def submit(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int] = (), *, version: int = 0
    ) -> list[str]:
        """Submit rollouts, of this version alone if it is given; their names."""
        self._asked += 1
        names = [f"ask{self._asked}-{number}" for number in range(len(prompts))]
        await self._lease.submit_rollouts(
            RolloutRequest(
                rollout_id=name,
                group_id=name,
                episode_id=name,
                prompt_ids=pack_ids(prompt),
                sampling=Sampling(temperature=0.0, max_tokens=length, ignore_eos=True),
                min_version=version,
                max_version=version,
            )
            for name, prompt, length in zip(names, prompts, lengths or [LENGTH] * len(prompts), strict=True)
        )
        return names

    async def begun(self, names: Sequence[str]) -> None:
        """Of each of these rollouts a token is stored."""
        async with asyncio.timeout(PATIENCE_S):
            for name in names:
                async with contextlib.aclosing(self.fleet.client.stream_tokens(self.run_id, name)) as chunks:
                    await anext(chunks)

    async def ended(self, names: Sequence[str]) -> list[TokenArray]:
        """The tokens of these rollouts, once all have ended."""
        found: dict[str, bytes] = {}
        async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(self._lease.finished()) as finishes:
            while not found.keys() >= set(names):
                finish = await anext(finishes)
                found[finish.rollout_id] = finish.tokens
        await self._lease.acknowledge(names)
        return [unpack_tokens(found[name]) for name in names]

    async def are_cut(self, names: Sequence[str], whole: Sequence[TokenArray]) -> None:
        """These rollouts are like `whole`, of version 1, up to some token, and from there on what version 2 makes of
        what they were by then."""
        cut = await self.ended(names)
        places = [int((one["version"] == 1).sum()) for one in cut]
        assert all(0 < place < len(one) for place, one in zip(places, cut, strict=True)), places
        texts = [prompt + one["id"][:place].tolist() for prompt, one, place in zip(PROMPTS, cut, places, strict=True)]
        lengths = [len(one) - place for one, place in zip(cut, places, strict=True)]
        rest = await self.ended(await self.submit(texts, lengths, version=2))
        for one, place, before, behind in zip(cut, places, whole, rest, strict=True):
            wanted = np.concatenate([before[:place], behind])
            assert one[["id", "version"]].tolist() == wanted[["id", "version"]].tolist()
            assert float(np.abs(one["logprob"] - wanted["logprob"]).max()) <= CLOSE

    def installed(self, worker: str) -> list[int]:
        """The run's versions that the worker installed, one after another."""
        entries = self.fleet.cluster.logged(worker, "installed")
        return [entry["version"] for entry in entries if entry["run_id"] == self.run_id]

    async def has(self, worker: str, version: int) -> None:
        what = f"version {version} of {self.run_id} on {worker}"
        await wait_until(lambda: version in self.installed(worker), PATIENCE_S, interval=0.05, what=what)

    async def held(self) -> list[int]:
        """The versions that the relay has."""
        state = await self.fleet.client.describe_weights(self.run_id)
        return [one.info.version.version for one in state.versions]


async def stopped(direction: Direction) -> None:
    """Half of the version has passed, and the rest waits."""
    await wait_until(lambda: direction.silent, PATIENCE_S, what="half of a version on its way")
