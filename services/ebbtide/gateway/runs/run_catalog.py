"""Says what the gateway needs of the coordinator and of this machine to serve runs."""

from typing import Protocol

from ebbtide.gateway.episodes.session_source import SessionSource
from ebbtide.gateway.generation.text_model import TextModel
from ebbtide.types.run import Run


class HeldSource(SessionSource, Protocol):
    """A source whose lease this process holds."""

    @property
    def is_lost(self) -> bool:
        """Whether the lease has ended: with its run, or as another process claimed it under the same name."""

    async def release(self) -> None: ...


class RunCatalog(Protocol):
    """All runs, and the way to each."""

    async def runs(self) -> list[Run]:
        """All runs that have a record, oldest first."""

    async def open(self, run: Run) -> HeldSource:
        """Claim a lease. Raises `NotFound` or `NotReady` for a run that takes no requests."""

    async def context(self, run: Run) -> int:
        """Most tokens of prompt and response of the run's model; 0 if its folder is not here."""

    async def text_model(self, run: Run) -> TextModel:
        """The text side of the run's model. Raises `InvalidRequest` naming `model` if it cannot be loaded here."""
