"""Takes a publisher's calls: joins the parts of a manifest, and of the patch that may follow its tensors, and notes
what is refused.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from ebbtide import telemetry
from ebbtide.errors import (
    AlreadyExists,
    ChunkCorrupt,
    EbbtideError,
    InvalidRequest,
    NoCapacity,
    PermissionDenied,
    Unavailable,
)
from ebbtide.types.weights import Manifest, Patch
from ebbtide.weight_relay import metrics
from ebbtide.weights import ManifestJoiner, ManifestLimits, ManifestPart, PatchJoiner

log = telemetry.get_logger(__name__)

#: Manifests that are sent at once, since each may take much memory; and those of one run, so that no run keeps the
#: others out: a trainer's, and one of the trainer that died before it.
MAX_JOINED: Final = 8
MAX_JOINED_OF_RUN: Final = 2
#: Seconds for a whole manifest; and for its first part, before which its run is not known and nothing is held for it.
PATIENCE_S: Final = 60.0
FIRST_S: Final = 15.0
_REASONS: dict[type[EbbtideError], str] = {
    InvalidRequest: "malformed",
    ChunkCorrupt: "digest",
    PermissionDenied: "signature",
    AlreadyExists: "conflict",
    NoCapacity: "capacity",
}


class JoinedPublish:
    """The manifests that are being sent to a relay."""

    def __init__(self, limits: ManifestLimits, *, patience_s: float = PATIENCE_S, first_s: float = FIRST_S) -> None:
        self._limits, self._patience_s, self._first_s = limits, patience_s, first_s
        self._open: Counter[str] = Counter()  # by run

    async def join(self, parts: AsyncIterator[ManifestPart]) -> tuple[Manifest, Patch | None]:
        """Join the parts. Raises as `PublishJoiner`, `NoCapacity` beyond `MAX_JOINED` and `MAX_JOINED_OF_RUN`, and
        `Unavailable` if they take too long."""
        joiner = PublishJoiner(self._limits)
        async with _within(self._first_s, "first part of the manifest"):
            first = await anext(parts, None)
        if first is None:
            return joiner.join()
        with self._place(first.run_id):
            async with _within(self._patience_s, "manifest"):
                joiner.add(first)
                async for part in parts:
                    joiner.add(part)
            return joiner.join()

    @contextmanager
    def _place(self, run_id: str) -> Iterator[None]:
        if self._open[run_id] >= MAX_JOINED_OF_RUN:
            text = f"{MAX_JOINED_OF_RUN} manifests of the run are being sent to this relay; retry later"
            raise NoCapacity(text, retry_after_s=1.0)
        if self._open.total() >= MAX_JOINED:
            raise NoCapacity(f"{MAX_JOINED} manifests are being sent to this relay; retry later", retry_after_s=1.0)
        self._open[run_id] += 1
        try:
            yield
        finally:
            self._open[run_id] -= 1
            if not self._open[run_id]:
                del self._open[run_id]


@asynccontextmanager
async def _within(seconds: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Unavailable(f"the {what} was not sent within {seconds:g} s; begin again") from None


class PublishJoiner:
    """Joins parts, and holds no more than `limits` allow and, of the patch, than the manifest has tiles."""

    def __init__(self, limits: ManifestLimits) -> None:
        self._tensors = ManifestJoiner(limits)
        self._manifest: Manifest | None = None
        self._patch: PatchJoiner | None = None

    def add(self, part: ManifestPart) -> None:
        """Take the next part. Raises `InvalidRequest` for parts out of order, malformed or beyond the limits."""
        if self._manifest is None or part.version is not None or part.tensors:
            if self._manifest is not None:
                raise InvalidRequest("tensors come before the patch", field="tensors")
            self._tensors.add(part)
        if part.patch is None:
            return
        if self._manifest is None or self._patch is None:
            self._manifest = self._tensors.join()
            self._patch = PatchJoiner(self._manifest)
        self._patch.add(part.patch)

    def join(self) -> tuple[Manifest, Patch | None]:
        """Manifest and patch, with roots and signatures not checked. Raises `InvalidRequest` if a part is missing."""
        if self._manifest is None or self._patch is None:
            return self._tensors.join(), None
        return self._manifest, self._patch.join()


@contextlib.contextmanager
def refusals(what: str, peer: str) -> Iterator[None]:
    """Count and log the errors that pass here. `peer` sent `what`."""
    try:
        yield
    except EbbtideError as error:
        if reason := _REASONS.get(type(error)):
            count_refusal(reason, what=what, peer=peer, error=str(error))
        raise


def count_refusal(reason: str, **facts: object) -> None:
    """Count and log one refusal."""
    metrics.REFUSALS.labels(reason).inc()
    log.warning("refused", reason=reason, **facts)
