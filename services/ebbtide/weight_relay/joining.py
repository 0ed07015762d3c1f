"""What a publisher sends to begin with: a manifest in parts, and behind its tensors maybe a patch."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from ebbtide.errors import InvalidRequest, NoCapacity, Unavailable
from ebbtide.types.weights import Manifest, Patch
from ebbtide.weights import Limits, ManifestJoiner, ManifestPart, PatchJoiner

#: Manifests that are being sent at once, of which each may take much memory; and seconds that one may take.
MAX_JOINED: Final = 8
PATIENCE_S: Final = 60.0


class Joining:
    """The manifests that are being sent to a relay."""

    def __init__(self, limits: Limits, *, patience_s: float = PATIENCE_S) -> None:
        self._limits, self._patience_s = limits, patience_s
        self._open = 0

    async def join(self, parts: AsyncIterator[ManifestPart]) -> tuple[Manifest, Patch | None]:
        """What the parts make up. Raises as `PublishJoiner`, `NoCapacity` beyond `MAX_JOINED`, and `Unavailable` for
        one that takes too long."""
        if self._open >= MAX_JOINED:
            raise NoCapacity(f"{MAX_JOINED} manifests are being sent to this relay; retry later", retry_after_s=1.0)
        self._open += 1
        try:
            joiner = PublishJoiner(self._limits)
            async with asyncio.timeout(self._patience_s):
                async for part in parts:
                    joiner.add(part)
            return joiner.join()
        except TimeoutError:
            raise Unavailable(f"the manifest was not sent within {self._patience_s:g} s; begin again") from None
        finally:
            self._open -= 1


class PublishJoiner:
    """Puts the parts together, holding no more than `limits` allow and, of the patch, than the manifest has tiles."""

    def __init__(self, limits: Limits) -> None:
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
        """Manifest and patch, neither roots nor signatures checked yet. Raises `InvalidRequest` if something lacks."""
        if self._manifest is None or self._patch is None:
            return self._tensors.join(), None
        return self._manifest, self._patch.join()
