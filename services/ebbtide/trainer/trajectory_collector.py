"""Gathers trajectories into whole groups, and records the outcome of each.

Invariant: an added trajectory is in `_waiting` (its step is not trained yet), in `uncommitted` (trained on or dropped;
committed only once a checkpoint that holds it is durable), or committed. Episode ids make repeats harmless. After a
restart the checkpoint restores `uncommitted`, and the coordinator sends the waiting ones again: also those that were
handed out, whose step had not ended.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
from msgspec import Struct

from ebbtide.types.rollout import DropReason, Trajectory, TrajectoryOutcome
from ebbtide.types.tokens import token_count, unpack_tokens

#: Staleness of a token without an announced version: too large for any setting.
_UNKNOWN: Final = 1 << 31


class ConsumedTrajectory(Struct, frozen=True, kw_only=True):
    """A trajectory whose outcome is decided."""

    episode_id: str
    cursor: str
    drop_reason: str = ""  # empty: trained on


class TrajectoryCollector:
    """Holds the trajectories of one run; `step` is the next step to train."""

    def __init__(
        self, *, step: int, max_staleness: int, consumed: Iterable[ConsumedTrajectory] = (), cursor: str = ""
    ) -> None:
        self.step = step
        self.uncommitted = list(consumed)
        self._max_staleness = max_staleness
        self._waiting: dict[int, dict[str, list[Trajectory]]] = defaultdict(lambda: defaultdict(list))
        self._whole: dict[int, set[str]] = defaultdict(set)  # step -> its whole groups
        self._handed_out: set[str] = set()  # groups of the next step
        self._known = {item.episode_id for item in self.uncommitted}
        self._read: list[str] = []
        self._cursor = cursor

    def add(self, trajectory: Trajectory) -> None:
        if trajectory.episode_id in self._known:
            return
        self._known.add(trajectory.episode_id)
        self._read.append(trajectory.cursor)
        taken = trajectory.step == self.step and trajectory.group_id in self._handed_out
        if taken or trajectory.step < self.step:  # its group was completed twice, and the step took the first
            self._consume(trajectory, DropReason.TOO_STALE)
        else:
            group = self._waiting[trajectory.step][trajectory.group_id]
            group.append(trajectory)
            if _whole(group):
                self._whole[trajectory.step].add(trajectory.group_id)

    def whole_groups(self) -> int:
        """Counts the next step's groups that have all their trajectories."""
        return len(self._whole.get(self.step, ()))

    def news(self, steps: Mapping[int, int]) -> bool:
        """Whether the next step has tokens of a version that is not in `steps` (version -> its step)."""
        waiting = (one for group in self._waiting.get(self.step, {}).values() for one in group)
        return any(staleness(one, self.step, steps)[1] == _UNKNOWN for one in waiting)

    def new_groups(self) -> int:
        """Counts the next step's whole groups that were not handed out."""
        return self.whole_groups() - len(self._handed_out)

    def new_tokens(self) -> int:
        """Counts the tokens of those groups, prompts included."""
        fresh = self._whole.get(self.step, set()) - self._handed_out
        return sum(_tokens(one) for name in fresh for one in self._waiting[self.step][name])

    def hand_out(self, steps: Mapping[int, int]) -> list[Trajectory]:
        """Returns the next step's whole groups as `take` does, each group once.

        They change no more, and their outcome stays open until `take` returns them again. `steps`: version -> its step,
        of all versions (see `news`).
        """
        fresh = sorted(self._whole.get(self.step, set()) - self._handed_out)
        self._handed_out.update(fresh)
        groups = (self._waiting[self.step][name] for name in fresh)
        return [one for group in groups for one, reason in self._decide(group, steps) if not reason]

    def take(self, steps: Mapping[int, int]) -> list[Trajectory]:
        """Takes the next step's whole groups, in an order independent of their arrival; drops stale and partial ones.

        `steps`: version -> its step.
        """
        groups, taken = self._waiting.pop(self.step, {}), []
        for _, group in sorted(groups.items()):
            for trajectory, reason in self._decide(group, steps):
                self._consume(trajectory, reason)
                if not reason:
                    taken.append(trajectory)
        self._whole.pop(self.step, None)
        self._handed_out.clear()
        self.step += 1
        return taken

    def cursor(self) -> str:
        """Returns where reading may resume: no trajectory up to it is still waiting."""
        waiting = {item.cursor for item in self._held()}
        while self._read and self._read[0] not in waiting:
            self._cursor = self._read.pop(0)
        return self._cursor

    def outcomes(self) -> list[TrajectoryOutcome]:
        return [TrajectoryOutcome(cursor=item.cursor, drop_reason=item.drop_reason) for item in self.uncommitted]

    def committed(self, count: int) -> None:
        """Removes the first `count` of `uncommitted`, which the coordinator will not send again."""
        for item in self.uncommitted[:count]:
            self._known.discard(item.episode_id)
        del self.uncommitted[:count]

    def _held(self) -> Iterator[Trajectory]:
        """All trajectories whose outcome is open."""
        return (item for groups in self._waiting.values() for group in groups.values() for item in group)

    def _decide(self, group: list[Trajectory], steps: Mapping[int, int]) -> list[tuple[Trajectory, str]]:
        """Returns each trajectory of the next step's group, and the reason to drop it, or none."""
        partial = "" if _whole(group) else DropReason.GROUP_INCOMPLETE
        return [
            (one, DropReason.TOO_STALE if staleness(one, self.step, steps)[1] > self._max_staleness else partial)
            for one in sorted(group, key=lambda one: one.episode_id)
        ]

    def _consume(self, trajectory: Trajectory, reason: str) -> None:
        item = ConsumedTrajectory(episode_id=trajectory.episode_id, cursor=trajectory.cursor, drop_reason=reason)
        self.uncommitted.append(item)


def staleness(trajectory: Trajectory, step: int, steps: Mapping[int, int]) -> tuple[float, int]:
    """Mean and largest number of steps from the versions of its sampled tokens to `step`."""
    tokens = unpack_tokens(trajectory.tokens)
    sampled = tokens["version"][np.frombuffer(trajectory.loss_mask, dtype=np.uint8) == 1]
    if not len(sampled):
        return 0.0, 0
    versions, counts = np.unique(sampled, return_counts=True)
    ages = [max(0, step - steps[version]) if version in steps else _UNKNOWN for version in versions.tolist()]
    return float(np.average(ages, weights=counts)), max(ages)


def _tokens(trajectory: Trajectory) -> int:
    return len(trajectory.prompt_ids) // 4 + token_count(trajectory.tokens)


def _whole(group: list[Trajectory]) -> bool:
    # A driver that restarted while it completed a group may state two sizes; only the smaller one is complete.
    return len(group) >= min(trajectory.group_size for trajectory in group)
