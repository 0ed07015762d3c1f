"""A step of `Lease.generate` can be asked for again until it is acknowledged, whatever became of its responses."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import pytest

from ebbtide.client.lease import Lease
from ebbtide.errors import AlreadyExists
from ebbtide.types.rollout import FinishedRollout, FinishReason, RolloutRequest, SubmitOutcome
from ebbtide.types.run import EnvironmentSpec, Run, RunSpec
from ebbtide.types.weights import PolicyVersion

DROPPED = "dead_lettered"


class StoredLease(Lease):
    """Calls no coordinator: `store` has each rollout's end, empty until it is acknowledged. Those of sample 1 are dead
    letters."""

    def __init__(self, store: dict[str, str]) -> None:
        self.run = Run(run_id="r", spec=RunSpec(name="r", model="m", environment=EnvironmentSpec(name="e")))
        self._dead = {}
        self._store = store

    async def submit_rollouts(self, rollouts: Iterable[RolloutRequest], **_: Any) -> list[SubmitOutcome]:
        ends = [self._store.setdefault(one.rollout_id, "") for one in rollouts]
        return [SubmitOutcome.COMPLETED if end else SubmitOutcome.ACCEPTED for end in ends]

    async def finished(self, cursor: str = "") -> AsyncGenerator[FinishedRollout, None]:
        for name in [name for name, end in self._store.items() if not end]:
            reason = FinishReason.DEAD_LETTERED if name.endswith(".1") else FinishReason.STOP
            yield FinishedRollout(rollout_id=name, group_id="g", episode_id=name, reason=reason, tokens=b"")

    async def _acknowledge(self, names: Sequence[str], drop_reason: str) -> None:
        self._store.update(dict.fromkeys(names, drop_reason or "trained"))


async def asked(lease: Lease, step: int, samples: int = 2) -> list[str]:
    version = PolicyVersion(policy="p", version=step, step=step)
    (group,) = await lease.generate([[1, 2]], samples=samples, step=step, version=version)
    return [one.rollout_id for one in group]


async def test_a_restarted_trainer_gets_a_step_with_a_dead_letter_again() -> None:
    store: dict[str, str] = {}
    assert await asked(StoredLease(store), 0) == ["s0.g0.0"]
    restarted = StoredLease(store)
    assert await asked(restarted, 0) == ["s0.g0.0"]
    await restarted.acknowledge(["s0.g0.0"])
    assert store == {"s0.g0.0": "trained", "s0.g0.1": DROPPED}
    with pytest.raises(AlreadyExists):
        await asked(StoredLease(store), 0)


async def test_dead_letters_of_a_later_step_wait_for_it_and_those_that_an_earlier_trainer_left_do_not() -> None:
    store = {"s0.g0.0": "trained", "s0.g0.1": ""}
    lease = StoredLease(store)
    await asked(lease, 1)
    await asked(lease, 2)
    await lease.acknowledge(["s1.g0.0"])
    assert store == {
        "s0.g0.0": "trained",
        "s0.g0.1": DROPPED,
        "s1.g0.0": "trained",
        "s1.g0.1": DROPPED,
        "s2.g0.0": "",
        "s2.g0.1": "",
    }
