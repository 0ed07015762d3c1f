"""Waits for groups in a trainer that lends nothing."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from ebbtide.types.rollout import Trajectory

Enough = Callable[[], bool]


class TrainingWindow(Protocol):
    """When the trainer has its device."""

    async def open(self) -> None:
        """The next step's version is on its way."""
        ...

    async def close(self, whole: Enough) -> None:
        """Return once the device is the trainer's; at the latest when all groups of the step are there (`whole`)."""
        ...

    async def groups(self, enough: Enough, whole: Enough) -> None:
        """Wait until there are enough groups, with the device."""
        ...

    def trained(self, trajectories: Iterable[Trajectory], *, learning_s: float) -> dict[str, float]:
        """Learn from a step that was trained. Returns the values to report of its window."""
        ...


class OwnWindow:
    """Of a device that is the trainer's for ever. `wait`: until there is enough."""

    def __init__(self, wait: Callable[[Enough], Awaitable[None]]) -> None:
        self._wait = wait

    async def open(self) -> None:
        """Nothing is lent."""

    async def close(self, whole: Enough) -> None:
        """Nothing comes back."""

    async def groups(self, enough: Enough, whole: Enough) -> None:  # noqa: ARG002 - the other kind needs it
        await self._wait(enough)

    def trained(self, trajectories: Iterable[Trajectory], *, learning_s: float) -> dict[str, float]:  # noqa: ARG002
        return {}
