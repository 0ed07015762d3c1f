"""Writes verified blobs into the stages of arriving versions, and commits each version once it is whole.

Invariant: versions are committed in the order of their steps, as each is the base of the next. Progress lies in the
relay's stages and on its disk; this keeps only which blobs are still to come.
"""

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from ebbtide.errors import InvalidRequest, NotReady, Unavailable
from ebbtide.transfer.blob_fetcher import BlobBatch
from ebbtide.types.weights import Manifest, Patch
from ebbtide.weight_relay.service import WeightRelay


class Step(Struct, frozen=True):
    """A version on the way, and the patch that leads to it from the step before; None: all its dense tiles."""

    manifest: Manifest
    patch: Patch | None


class StageSink:
    def __init__(self, relay: WeightRelay, steps: Sequence[tuple[Step, Sequence[bytes]]]) -> None:
        """`steps`: staged versions, each with the blobs that it lacks."""
        self._relay = relay
        self._steps = deque((step, set(digests)) for step, digests in steps)
        self._committing = False

    async def take(self, _batch: BlobBatch, blobs: dict[bytes, bytes], _source: str, /) -> None:
        """Raises what the relay does; `Unavailable` if a stage, or the base of a patch, has gone meanwhile."""
        for digest, data in blobs.items():
            try:
                await self._relay.put(digest, data, verified=True)
            except InvalidRequest as error:
                if error.field != "digest":
                    raise
                raise Unavailable(f"the stage has gone meanwhile ({error})") from None
            for _, lacking in self._steps:
                lacking.discard(digest)
        await self.commit()

    async def commit(self) -> None:
        """Commit the versions that are whole."""
        if self._committing:
            return  # the one who does looks at the next version, too
        self._committing = True
        try:
            while self._steps and not self._steps[0][1]:
                manifest = self._steps[0][0].manifest
                await self._relay.commit(manifest.run_id, manifest.version)
                self._steps.popleft()
        except NotReady as error:  # its base, or a blob that was damaged, has gone meanwhile
            raise Unavailable(str(error)) from None
        finally:
            self._committing = False
