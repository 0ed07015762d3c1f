"""A short run of the built-in trainer, submitted from the user's host, and what has to hold when it has ended."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from ebbtide.types.run import Run, RunEvent, RunStatus
from tests.hosts.cluster import FLUSH_TOKENS, Cluster
from tests.support.waiting import wait_until

RUN: Final = "r"
_PATIENCE_S: Final = 240.0
_GROUPS, _GROUP_SIZE = 4, 4


class ShortRun:
    """Submitted by `submit`; `events` are those that the user has seen so far."""

    def __init__(self, cluster: Cluster, model: Path) -> None:
        self._cluster, self.model, self.steps = cluster, model, 0
        self.output = cluster.directory / "output"
        self._said = cluster.directory / "user.out"
        self._user: subprocess.Popen[bytes] | None = None
        self._spec: dict[str, Any] = {
            "name": "short",
            "model": str(model),
            "output": str(self.output),
            "environment": {"name": "number_guessing", "params": {"max_turns": 2}},
            "sampling": {"max_tokens": 24, "stop_token_ids": [1]},
            "batch": {"groups_per_step": _GROUPS, "group_size": _GROUP_SIZE, "max_staleness": 1},
        }

    def submit(self, *, steps: int = 6) -> Self:
        """Start the user's program."""
        self.steps, self._spec["trainer"] = steps, {"steps": steps, "checkpoint_every": 2}
        spec = self._cluster.directory / "spec.json"
        spec.write_text(json.dumps(self._spec))
        command = self._cluster.network.on("user", sys.executable, "-m", "tests.hosts.user", RUN, str(spec))
        with self._said.open("wb") as out:
            environment = self._cluster.environment("user")
            self._user = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        return self

    def close(self) -> None:
        if self._user is not None:
            self._user.kill()
            self._user.wait()

    @property
    def step(self) -> int:
        """The newest step whose version was announced; -1 before the first."""
        return max((int(event.values["step"]) for event in self._events() if event.kind == "version"), default=-1)

    async def past(self, step: int) -> None:
        await wait_until(lambda: self.step >= step, timeout=_PATIENCE_S, interval=0.05, what=f"step {step}")

    async def ended(self) -> Run:
        """Wait until the user's program ends, and check the books."""
        user = self._user
        assert user is not None
        await wait_until(lambda: user.poll() is not None, timeout=_PATIENCE_S, interval=0.1, what="the end of the run")
        assert user.returncode == 0, self._said.read_text()
        run = msgspec.json.decode(self._lines()[-1], type=Run)
        self._check(run)
        return run

    def _check(self, run: Run) -> None:
        """Each episode was trained on once, nothing was lost, and little was generated twice."""
        episodes = self.steps * _GROUPS * _GROUP_SIZE
        assert run.status is RunStatus.FINISHED, run.message
        assert not run.dropped
        assert run.counters["submitted"] == run.counters["trained"] >= episodes
        versions = [event.values["version"] for event in self._events() if event.kind == "version"]
        assert versions == sorted(set(versions))
        assert len(versions) == self.steps + 1
        trained = self._consumed()
        assert set(trained.values()) == {1}
        assert len(trained) == episodes
        twice, interruptions = self.generated_twice(run), self.interruptions()
        assert 0 <= twice <= FLUSH_TOKENS * interruptions, f"{twice} tokens in {interruptions} interruptions"

    def generated_twice(self, run: Run) -> int:
        return sum(record.generated for record in self._cluster.ledger()) - run.counters["tokens_stored"]

    def interruptions(self) -> int:
        """How many attempts were begun after a rollout's first."""
        ledger = self._cluster.ledger()
        return len(ledger) - len({record.rollout_id for record in ledger})

    def _consumed(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for path in (self.output / RUN / "checkpoints").glob("step-*/trainer/state.json"):
            state = json.loads(path.read_text())
            found.update(item["episode_id"] for item in state["training"]["consumed"])
        return found

    def _events(self) -> list[RunEvent]:
        return [msgspec.json.decode(line, type=RunEvent) for line in self._lines() if line.startswith('{"kind"')]

    def _lines(self) -> list[str]:
        """Whole ones."""
        return self._said.read_text().splitlines(keepends=False) if self._said.exists() else []
