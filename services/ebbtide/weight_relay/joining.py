"""What a publisher sends to begin with: a manifest in parts, and behind its tensors maybe a patch."""

from ebbtide.errors import InvalidRequest
from ebbtide.types.weights import Manifest, Patch
from ebbtide.weights import Limits, ManifestJoiner, ManifestPart, PatchJoiner


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
