"""Collects what a step trains on: the trajectories of episodes, or those of agents' sessions."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
from msgspec import Struct

from ebbtide.types.rollout import DropReason, Trajectory, TrajectoryOutcome
from ebbtide.types.run import RunSpec
from ebbtide.types.tokens import token_count, unpack_tokens

# Gathers trajectories into whole groups, and records the outcome of each.
#
# Invariant: an added trajectory is in `_waiting` (its step is not trained yet), in `uncommitted` (trained on or
# dropped; committed only once a checkpoint that holds it is durable), or committed. Episode ids make repeats
# harmless. After a restart the checkpoint restores `uncommitted`, and the coordinator sends the waiting ones again:
# also those that were handed out, whose step had not ended.

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


# Gathers the sessions of agents into groups, and gives each step the first groups that become whole.
#
# A session is one member of its group, however many branches it has. Nobody asked for it for a certain step: it is
# trained on by the step during which its group becomes whole, unless a token of it is too stale by then.
#
# Invariant: that of `TrajectoryCollector`. Trajectories are taken from the stream one by one, in its order, until a
# step has its groups; further ones wait for the next step. A group that is whole changes no more. So a restarted
# trainer gives each step the same groups, however much of the stream is there by then.


class SessionCollector(TrajectoryCollector):
    """Holds the sessions of one run; `step` is the next step to train."""

    def __init__(
        self,
        spec: RunSpec,
        steps: Mapping[int, int],
        *,
        step: int,
        consumed: Iterable[ConsumedTrajectory] = (),
        cursor: str = "",
    ) -> None:
        """`steps`: version -> its step, of all announced versions at any time."""
        super().__init__(step=step, max_staleness=spec.batch.max_staleness, consumed=consumed, cursor=cursor)
        self._batch, self._last, self._steps = spec.batch, spec.trainer.steps, steps
        self._unread: deque[Trajectory] = deque()  # in the order of the stream
        self._groups: dict[str, list[Trajectory]] = {}
        self._ready: list[str] = []  # the next step's groups, in the order in which they became whole

    def add(self, trajectory: Trajectory) -> None:
        if trajectory.episode_id in self._known:
            return
        self._known.add(trajectory.episode_id)
        self._read.append(trajectory.cursor)
        if self.step >= self._last:
            self._consume(trajectory, DropReason.TOO_STALE)
        else:
            self._unread.append(trajectory)

    def whole_groups(self) -> int:
        """Counts the next step's groups that are whole, after reading on in the stream."""
        while self._unread and len(self._ready) < self._batch.groups_per_step:
            self._sort(self._unread.popleft())
        return len(self._ready)

    def news(self, steps: Mapping[int, int]) -> bool:
        members = (one for name in self._ready for one in self._groups[name])
        return any(version not in steps for one in members for version in _sampled_by(one))

    def take(self, steps: Mapping[int, int]) -> list[Trajectory]:
        """Takes the next step's groups, each with as many sessions as a group has. `steps`: version -> its step."""
        self._steps = steps
        self._handed_out.clear()
        taken = [one for name in self._ready for one in self._take_group(self._groups.pop(name))]
        self._ready.clear()
        self.step += 1
        if self.step >= self._last:
            self._drop_all()
        else:
            self._drop_stale()
        return taken

    def new_tokens(self) -> int:
        fresh = (name for name in self._ready if name not in self._handed_out)
        members = (one for name in fresh for one in self._groups[name])
        return sum(len(one.prompt_ids) // 4 + token_count(one.tokens) for one in members)

    def hand_out(self, steps: Mapping[int, int]) -> list[Trajectory]:
        self._steps = steps
        fresh = [name for name in self._ready if name not in self._handed_out]
        self._handed_out.update(fresh)
        return [one for name in fresh for one, reason in self._outcomes(self._groups[name]) if not reason]

    def _held(self) -> Iterator[Trajectory]:
        yield from self._unread
        for group in self._groups.values():
            yield from group

    def _sort(self, trajectory: Trajectory) -> None:
        if self._is_stale(trajectory):
            self._consume(trajectory, DropReason.TOO_STALE)
            return
        if trajectory.group_id in self._ready:
            self._consume(trajectory, DropReason.GROUP_FULL)
            return
        group = self._groups.setdefault(trajectory.group_id, [])
        group.append(trajectory)
        if len(_complete(group)) >= self._batch.group_size:
            self._ready.append(trajectory.group_id)

    def _take_group(self, group: list[Trajectory]) -> list[Trajectory]:
        decided = self._outcomes(group)
        for one, reason in decided:
            self._consume(one, reason)
        return [one for one, reason in decided if not reason]

    def _outcomes(self, group: list[Trajectory]) -> list[tuple[Trajectory, str]]:
        """Returns each branch of a whole group, and the reason to drop it, or none."""
        members = _complete(group)[: self._batch.group_size]
        reasons = {True: "", False: DropReason.GROUP_FULL}
        ordered = sorted(group, key=lambda one: one.episode_id)
        return [(one, reasons[one.session_id in members]) for one in ordered]

    def _drop_stale(self) -> None:
        """Drop whole sessions: the advantage of one is for all of its tokens."""
        stale = {one.session_id for group in self._groups.values() for one in group if self._is_stale(one)}
        for name, group in list(self._groups.items()):
            for one in group:
                if one.session_id in stale:
                    self._consume(one, DropReason.TOO_STALE)
            self._groups[name] = [one for one in group if one.session_id not in stale]
            if not self._groups[name]:
                del self._groups[name]

    def _drop_all(self) -> None:
        for one in self._held():
            self._consume(one, DropReason.TOO_STALE)
        self._unread.clear()
        self._groups.clear()

    def _is_stale(self, trajectory: Trajectory) -> bool:
        """A version that is not announced yet is newer than the next step's."""
        ages = (self.step - self._steps[one] for one in _sampled_by(trajectory) if one in self._steps)
        return max(ages, default=0) > self._max_staleness


def _complete(group: list[Trajectory]) -> list[str]:
    """The sessions of which all branches are here, in the order in which they began to arrive."""
    branches: dict[str, int] = {}
    for one in group:
        branches[one.session_id] = branches.get(one.session_id, 0) + 1
    wanted = {one.session_id: one.branches for one in group}
    return [session for session, count in branches.items() if count >= wanted[session]]


def _sampled_by(trajectory: Trajectory) -> set[int]:
    """The versions that sampled its tokens."""
    versions = unpack_tokens(trajectory.tokens)["version"]
    return set(np.unique(versions[np.frombuffer(trajectory.loss_mask, dtype=np.uint8) == 1]).tolist())
