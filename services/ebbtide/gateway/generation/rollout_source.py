"""Says what the gateway needs of the coordinator to play a run's requests."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from ebbtide.types.key_usage import KeyUsage, MeteredKey
from ebbtide.types.rollout import RolloutRequest, TokenChunk
from ebbtide.types.run import Run


class RolloutSource(Protocol):
    """A run that the gateway holds a lease of. All calls may be repeated, and wait while the coordinator is away."""

    @property
    def run(self) -> Run:
        """The run, as it was known lately."""

    async def refreshed(self) -> Run:
        """The run as it is now."""

    async def submit(self, rollouts: Sequence[RolloutRequest], key: MeteredKey | None = None) -> None:
        """Queue rollouts, idempotent by id. Waits for room, for seconds. New ones are charged to the account of `key`.

        Raises `AlreadyExists` for the id of another rollout, `NoCapacity` if no room came, and `RateLimited` or
        `BudgetSpent` at once.
        """

    async def key_usage(self, owner: str) -> KeyUsage:
        """What the keys with limits of an owner have used."""

    def tokens(self, rollout_id: str) -> AsyncGenerator[TokenChunk, None]:
        """All tokens of a rollout from its first one, as they come. The last chunk has a reason."""

    async def cancel(self, rollout_ids: Sequence[str], reason: str = "") -> None:
        """End rollouts. Their tokens stay, and `reason` becomes the message of their last chunk."""
