"""Gathers the sessions of agents into groups, and gives each step the first groups that become whole.

A session is one member of its group, however many branches it has. Nobody asked for it for a certain step: it is
trained on by the step during which its group becomes whole, unless a token of it is too stale by then.

Invariant: that of `TrajectoryCollector`. Trajectories are taken from the stream one by one, in its order, until a step
has its groups; further ones wait for the next step. A group that is whole changes no more. So a restarted trainer gives
each step the same groups, however much of the stream is there by then.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ebbtide.trainer.trajectory_collector import ConsumedTrajectory, TrajectoryCollector
from ebbtide.types.rollout import DropReason, Trajectory
from ebbtide.types.run import RunSpec
from ebbtide.types.tokens import token_count, unpack_tokens


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
