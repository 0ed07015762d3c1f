"""What a seed is about: the size of everything, its runs, and the rollouts that each of them is to bring."""

import random
from typing import Final

import numpy as np
from msgspec import Struct

from ebbtide.types.rollout import FinishReason, RolloutRequest
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids
from tests.fakes.scripted_engine import END, follow
from tests.fakes.scripted_settings import ScriptedSettings

GROUP: Final = 4
#: Batches of rollouts at most.
MOST: Final = 14
#: What becomes of a group's rollouts once they are finished (`cancelled`: while they are under way).
FATES: Final = ("trained", "committed", "too_short", "trained", "too_long", "cancelled")
#: Groups of the first batches of each run, by how many runs there are; and of each batch that follows.
_FIRST_GROUPS: Final = {
    1: ((2, 3), (3, 3), (2, 2, 2), (4, 2)),
    2: ((1, 2), (2, 1), (1, 1, 1)),
    3: ((1, 1), (2,)),
}
_LATER_GROUPS: Final = {1: 2, 2: 1, 3: 1}
#: Every run's weights have values of their own: version V of one run is not version V of another.
_APART: Final = 1000.0


class Wanted(Struct, frozen=True):
    """A rollout, and what it comes to if nothing disturbs it. `bits`: of its logprobs, without the attempts' tags."""

    request: RolloutRequest
    ids: "np.ndarray[tuple[int], np.dtype[np.uint32]]"
    bits: "np.ndarray[tuple[int], np.dtype[np.uint32]]"
    reason: FinishReason
    fate: str
    pinned: bool

    @property
    def length(self) -> int:
        return len(self.ids)


def batch_of(rollout_id: str) -> int:
    """The batch of a rollout, by its id: also the step that it is submitted for."""
    return int(rollout_id[1:].partition(".")[0])


def key_of(run_id: str, rollout_id: str) -> str:
    """The name of a rollout among those of all runs: ids of rollouts are the same in every run."""
    return f"{run_id}/{rollout_id}"


def weights_mark(number: int, step: int) -> float:
    """The value in the weights that run `number` publishes at this step."""
    return number * _APART + step


class RunPlan:
    """One run. `cancel_after`: the batch behind which its user cancels it; -1 for a run that comes to its end."""

    def __init__(self, number: int, chance: random.Random, script: ScriptedSettings, runs: int) -> None:
        self.number, self.run_id = number, f"r{number}"
        self._script = script
        first = chance.choice(_FIRST_GROUPS[runs])
        groups = (*first, *(_LATER_GROUPS[runs] for _ in range(MOST)))[:MOST]
        self.least = len(first)  # batches; more while faults are to come
        self._fate = chance.randrange(len(FATES))
        self.batches = [
            [self._wanted(chance, batch, number) for number in range(GROUP * count)]
            for batch, count in enumerate(groups)
        ]
        self.gaps = [chance.uniform(0.3, 2.0) for _ in self.batches]
        self.wanted = {one.request.rollout_id: one for batch in self.batches for one in batch}
        self.weight = 1.0
        self.begins_s, self.cancel_after = 0.0, -1
        if number:  # others come later, count more or less, and one of them may be cancelled
            self.begins_s = chance.choice((0.0, chance.uniform(0.5, 6.0)))
            self.weight = chance.choice((1.0, 1.0, 0.25, 4.0))
            self.cancel_after = self.least - 1 if number == runs - 1 and chance.random() < 0.35 else -1

    @property
    def spec(self) -> dict[str, object]:
        return {
            "name": "simulated",
            "model": "scripted",
            "environment": {"name": "none"},
            "share": {"weight": self.weight},
        }

    def _wanted(self, chance: random.Random, batch: int, number: int) -> Wanted:
        if number % GROUP == 0:
            self._fate += 1
        prompt = [chance.randrange(2, self._script.vocab_size) for _ in range(chance.randrange(2, 9))]
        most = chance.randrange(8, 41)
        request = RolloutRequest(
            rollout_id=f"x{batch}.{number}",
            group_id=f"g{batch}.{number // GROUP}",
            episode_id=f"e{batch}.{number}",
            prompt_ids=pack_ids(prompt),
            sampling=Sampling(max_tokens=most, min_tokens=chance.choice((0, 0, 5))),
            priority=chance.choice((0, 0, 1)),
            interactive=number % 3 == 0,
        )
        script = follow(self._script, prompt, most)
        ids = [token for token, _ in script]
        ends = [at for at, token in enumerate(ids) if token == END and at >= request.sampling.min_tokens]
        length = ends[0] + 1 if ends else most
        bits = np.array([logprob for _, logprob in script[:length]], dtype="<f4").view("<u4")
        return Wanted(
            request=request,
            ids=np.array(ids[:length], dtype=np.uint32),
            bits=bits,
            reason=FinishReason.STOP if ends else FinishReason.LENGTH,
            fate=FATES[self._fate % len(FATES)],
            pinned=chance.random() < 0.2,
        )


class Plan:
    """`runs`: in the order of their numbers. `wanted`: by `key_of`."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed ^ 0x5EED)
        self.seed = seed
        self.workers = chance.choice((3, 3, 4))
        self.slots = chance.choice((4, 6, 10))
        self.flush_tokens = chance.choice((3, 8, 32))
        self.flush_interval_ms = chance.choice((40, 120, 250))
        self.reattach_grace_s = chance.choice((0.0, 2.0))
        self.script = ScriptedSettings(
            step_s=chance.choice((0.04, 0.08, 0.15)),
            first_token_s=chance.choice((0.0, 0.1, 0.6)),
            install_s=chance.choice((0.0, 0.2)),
            vocab_size=64,
            mean_length=chance.choice((0, 60)),
            max_model_len=512,
        )
        runs = chance.choice((1, 2, 2, 3))
        self.runs = [RunPlan(number, chance, self.script, runs) for number in range(runs)]
        self.wanted = {key_of(run.run_id, name): one for run in self.runs for name, one in run.wanted.items()}
        # Apart, so that all else is as it was without them: so many of the workers are borrowed.
        self.borrowed = random.Random(seed ^ 0x1E27).choice((0, 0, 1, 2))
        self.standby = random.Random(seed ^ 0x57BD).random() < 0.6  # a second coordinator waits
        self.forgetful = chance.random() < 0.2  # the store syncs every second, and loses its newest when it is killed
