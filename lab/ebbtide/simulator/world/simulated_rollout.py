"""Models rollouts as the store would keep them: stored tokens, attempts, and the workers that they avoid."""

from typing import Final

from msgspec import Struct

from ebbtide.scheduling.steps.step_pacing import VersionBounds

#: As `requeue.lua`: workers remembered per rollout, the newest.
_AVOIDED: Final = 16


class SimulatedRollout(Struct, kw_only=True, eq=False, gc=False):
    """One turn of an episode. Lengths in tokens."""

    rollout_id: str
    episode_id: str
    run: str
    step: int
    group: int  # number of its prompt in the step
    bounds: VersionBounds
    prompt: int
    length: int  # of the whole response: what its model would say, however often it is interrupted
    prefix: str  # names the first turn's prompt, which the samples of a group share
    after: tuple[str, ...] = ()  # the rollouts of the turns before, the last one first
    place: int = 0
    stored: int = 0
    attempts: int = 0
    no_progress: int = 0
    avoid: tuple[str, ...] = ()
    home: str = ""

    def avoid_worker(self, worker: str) -> None:
        """Remember a worker that fell silent with it."""
        if worker not in self.avoid:
            self.avoid = (worker, *self.avoid)[:_AVOIDED]
