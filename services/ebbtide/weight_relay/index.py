"""What the relay holds, in memory.

Invariant: `on_disk` names every tile file; a committed version's tiles are all in it; only `Relay` writes here,
under its lock but for `stored`. Stages live in memory alone: they die with the process, and the next start deletes
their tiles.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from ebbtide.errors import AlreadyExists, InvalidRequest, NotReady, VersionUnavailable
from ebbtide.scheduling.retention import HeldVersion
from ebbtide.types.weights import Manifest, PolicyVersion, VersionInfo
from ebbtide.weights import tile_sizes

Stream = tuple[str, str]


class Holding(Struct, kw_only=True):
    """A version, committed or staged. `used_at` is when it was last published, written to or read."""

    manifest: Manifest
    tiles: dict[bytes, int]
    used_at: float

    @property
    def stream(self) -> Stream:
        return self.manifest.run_id, self.manifest.version.policy

    @property
    def info(self) -> VersionInfo:
        size = sum(entry.size for entry in self.manifest.tensors)
        tensors = len(self.manifest.tensors)
        return VersionInfo(run_id=self.manifest.run_id, version=self.manifest.version, size=size, tensors=tensors)


class Index:
    def __init__(self) -> None:
        self._committed: dict[Stream, dict[int, Holding]] = {}
        self._stages: dict[tuple[str, str, int], Holding] = {}
        self._serving: dict[bytes, int] = {}  # digest -> committed versions that hold it
        self.on_disk: dict[bytes, int] = {}

    # -- committed versions --------------------------------------------------------------------------------------

    def committed(self) -> Iterator[Holding]:
        for versions in self._committed.values():
            yield from versions.values()

    def stream(self, stream: Stream) -> dict[int, Holding]:
        return self._committed.get(stream, {})

    def find(self, run_id: str, policy: str, version: int) -> Holding:
        """The committed version, or the newest for 0. Raises `VersionUnavailable`."""
        versions = self.stream((run_id, policy))
        found = versions.get(version or max(versions, default=0))
        if found is None:
            held = ", ".join(map(str, sorted(versions))) or "none"
            name = f"version {version}" if version else "any version"
            raise VersionUnavailable(f"{name} of policy {policy} of run {run_id} is not here (held: {held})")
        return found

    def check_same(self, run_id: str, version: PolicyVersion) -> Holding | None:
        """The committed version of that number, if any. Raises `AlreadyExists` if it has another root."""
        found = self.stream((run_id, version.policy)).get(version.version)
        if found is not None and found.manifest.version != version:
            raise AlreadyExists(f"version {version.version} of {version.policy} is committed with another root")
        return found

    def serves(self, digest: bytes) -> bool:
        return digest in self._serving

    def owners(self, digest: bytes) -> list[Holding]:
        """The committed versions that hold a tile."""
        return [holding for holding in self.committed() if digest in holding.tiles]

    def commit(self, holding: Holding) -> None:
        """Make a version visible; it is no longer a stage."""
        version = holding.manifest.version.version
        self._stages.pop((*holding.stream, version), None)
        self._committed.setdefault(holding.stream, {})[version] = holding
        for digest in holding.tiles:
            self._serving[digest] = self._serving.get(digest, 0) + 1

    def evict(self, stream: Stream, version: int) -> None:
        holding = self._committed[stream].pop(version)
        if not self._committed[stream]:
            del self._committed[stream]
        for digest in holding.tiles:
            self._serving[digest] -= 1
            if not self._serving[digest]:
                del self._serving[digest]

    def held_versions(self, now: float) -> list[HeldVersion]:
        return [
            HeldVersion(
                stream=item.stream,
                version=item.manifest.version.version,
                tiles=item.tiles,
                idle_s=now - item.used_at,
            )
            for item in self.committed()
        ]

    # -- stages --------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> list[Holding]:
        return list(self._stages.values())

    def stage(self, manifest: Manifest, now: float) -> Holding:
        """Put a checked manifest where its tiles may come; a stage of the same version gives way."""
        tiles = tile_sizes(manifest)
        for digest, size in tiles.items():
            if (found := self.on_disk.get(digest, size)) != size:
                raise InvalidRequest(f"tile {digest.hex()} has {found} bytes, not {size}", field="tensors.digests")
        holding = Holding(manifest=manifest, tiles=tiles, used_at=now)
        self._stages[(*holding.stream, manifest.version.version)] = holding
        return holding

    def unstage(self, holding: Holding) -> None:
        self._stages.pop((*holding.stream, holding.manifest.version.version), None)

    def staged(self, run_id: str, version: PolicyVersion) -> Holding:
        """The stage to commit. Raises `NotReady` if there is none, or while it lacks tiles."""
        found = self._stages.get((run_id, version.policy, version.version))
        if found is None or found.manifest.version != version:
            raise NotReady(f"version {version.version} of {version.policy} is not staged here; begin its publish again")
        if lacking := sum(1 for _ in self.missing(found)):
            raise NotReady(f"version {version.version} of {version.policy} still lacks {lacking} tiles; put them first")
        return found

    def missing(self, holding: Holding) -> Iterator[bytes]:
        return (digest for digest in holding.tiles if digest not in self.on_disk)

    def wanted(self, digest: bytes, now: float) -> int:
        """Bytes of a tile that a stage wants, which it keeps alive. Raises `InvalidRequest` for one that none wants."""
        sizes = []
        for holding in self._stages.values():
            if digest in holding.tiles:
                holding.used_at = now
                sizes.append(holding.tiles[digest])
        if not sizes:
            raise InvalidRequest(
                f"tile {digest[:32].hex()} belongs to no staged version; begin the publish again", field="digest"
            )
        return sizes[0]

    # -- tiles ---------------------------------------------------------------------------------------------------

    def stored(self, digest: bytes, size: int) -> None:
        self.on_disk[digest] = size

    def garbage(self) -> list[bytes]:
        """Tiles that no version and no stage holds."""
        return [
            digest
            for digest in self.on_disk
            if digest not in self._serving and not any(digest in stage.tiles for stage in self._stages.values())
        ]

    def forget(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self.on_disk.pop(digest, None)
