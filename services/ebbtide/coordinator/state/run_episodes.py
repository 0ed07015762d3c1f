"""Models a run's episodes between their turns: where prefixes are cached, what ended, and where groups wait.

Invariant: `responses` has each episode of training whose newest response ended, until its next turn is queued or the
episode is over. A group's place is remembered until nothing of it is open. All of it is bounded, and lost with the
process: the next turn of each episode is read again wherever it goes, and until the open groups are complete, those
that ended are not known.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from ebbtide.coordinator.forecasts.length_forecasts import LengthForecasts
from ebbtide.coordinator.rules.rollout_queue import GroupPlaces, QueuedRollout
from ebbtide.coordinator.rules.turn_routing import CachedPrefixes, Prefixes
from ebbtide.coordinator.state.running_attempt import RunningAttempt
from ebbtide.coordinator.state.worker_session import WorkerSession

#: Episodes per run that may go on although their newest rollout was acknowledged: the newest ones are remembered.
_ACKNOWLEDGED: Final = 1 << 12
#: Episodes whose responses are remembered. Trainers that neither complete nor acknowledge them leave them here.
_EPISODES: Final = 1 << 17


class EndedResponses:
    """The groups of which responses ended, and which are not complete; of too many episodes, the newest."""

    def __init__(self, memory: int = _EPISODES) -> None:
        self._memory = memory
        self._groups: dict[str, int] = {}  # episode -> its group
        self.by_group: dict[int, set[str]] = {}  # group -> episodes

    def ended(self, episode_id: str, group: int) -> None:
        """Note that a response of the episode ended."""
        self.forget(episode_id)
        self._groups[episode_id] = group
        self.by_group.setdefault(group, set()).add(episode_id)
        if len(self._groups) > self._memory:
            self.forget(next(iter(self._groups)))

    def forget(self, episode_id: str) -> int | None:
        """Note that the episode is over, or goes on. Returns its group, if it was known."""
        group = self._groups.pop(episode_id, None)
        if group is not None:
            members = self.by_group[group]
            members.remove(episode_id)
            if not members:
                del self.by_group[group]
        return group


class RunEpisodes:
    def __init__(self, run_id: str, lengths: LengthForecasts) -> None:
        self.run_id, self._lengths = run_id, lengths
        self._prefixes = CachedPrefixes()
        self.prefixes: Final[Prefixes] = self._prefixes.by_episode  # by session
        self._responses = EndedResponses()
        #: Training's episodes whose newest response ended and that are not complete, by group place.
        self.responses: Final[Mapping[int, AbstractSet[str]]] = self._responses.by_group
        self._places = GroupPlaces()
        self._acknowledged: dict[str, None] = {}  # episodes, the newest at the end

    def group_place(self, group_id: str, place: int) -> int:
        """The place of the group's first rollout: `place`, if this is the first."""
        return self._places.of(group_id, place)

    def queued(self, one: QueuedRollout) -> None:
        """Note that an episode's next turn waits, or a turn again."""
        self._responses.forget(one.episode_id)

    def started(self, rollout: QueuedRollout, session: WorkerSession) -> int:
        """Note that a worker gets a turn. Returns how many of its tokens the worker had."""
        self._acknowledged.pop(rollout.episode_id, None)
        version = session.version_of(self.run_id)
        return self._prefixes.began(rollout.episode_id, session.session_id, version=version, tokens=rollout.length)

    def put_back(self, attempt: RunningAttempt) -> None:
        """Note that a worker stopped within a turn."""
        self._prefixes.left(attempt.rollout.episode_id, attempt.length)

    def finished(self, attempt: RunningAttempt, session: WorkerSession | None) -> None:
        """Note that a turn's response ended at a worker, which may have come with it; None: at an unknown one."""
        rollout, episode_id = attempt.rollout, attempt.rollout.episode_id
        if not (rollout.request or rollout.evaluation):
            self._responses.ended(episode_id, rollout.group)
        if session is None:
            return
        if session.session_id not in self.prefixes.get(episode_id, ()):
            version = session.version_of(self.run_id)
            self._prefixes.began(episode_id, session.session_id, version=version, tokens=attempt.length)
        self._prefixes.left(episode_id, attempt.length)

    def acknowledged(self, episode_id: str) -> None:
        """Note that a finished rollout of the episode was acknowledged. Callers that acknowledge never say that an
        episode is over, so of too many the oldest one counts as over.
        """
        self._acknowledged.pop(episode_id, None)
        self._acknowledged[episode_id] = None
        if len(self._acknowledged) > _ACKNOWLEDGED:
            self.forget(next(iter(self._acknowledged)))

    def forget(self, episode_id: str) -> None:
        """Note that the episode has no further turn."""
        self._acknowledged.pop(episode_id, None)
        self._prefixes.forget(episode_id)
        group = self._responses.forget(episode_id)
        if group is not None and group not in self.responses and not self._lengths.has_open(group):
            self._places.forget(group)
