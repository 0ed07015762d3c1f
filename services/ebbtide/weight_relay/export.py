"""Adds a version from a running relay to a static copy."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta, Struct

from ebbtide.auth.security import ClientSecurity
from ebbtide.errors import EbbtideError, VersionUnavailable
from ebbtide.settings import load

if TYPE_CHECKING:
    from ebbtide.types.weights import Patch
    from ebbtide.weight_relay.static_copy import StaticVersion
    from ebbtide.weight_relay.subscription import Upstream


#: Makes what is entered while the relay is waited for.
Waits = Callable[[], AbstractContextManager[object]]
#: Blobs asked for in one call.
_MOST: Final = 1024


class ExportSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of an export."""

    run: Annotated[str, Meta(description="run whose policy version is exported")]
    folder: Annotated[str, Meta(description="folder of the copy, of one policy of one run; created if missing")]
    relay: Annotated[str, Meta(description="address of the weight-relay")] = "127.0.0.1:7610"
    policy: Annotated[str, Meta(description="policy of the run")] = "policy"
    version: Annotated[int, Meta(ge=0, description="version to export; 0 takes the newest")] = 0
    dense: Annotated[bool, Meta(description="include all dense tiles, for readers that hold no earlier version")] = True
    security: ClientSecurity = ClientSecurity()


def main(argv: Sequence[str] | None = None, waiting: Waits = nullcontext) -> None:
    """Add a version to a folder that any web server or object store can serve to workers and relays."""
    prog, description = "ebbtide weights export", main.__doc__ or ""
    settings = load(ExportSettings, prog=prog, program="weights-export", argv=argv, description=description)
    try:
        asyncio.run(export(settings, waiting))
    except EbbtideError as error:
        print(f"{prog}: {error}", file=sys.stderr)  # noqa: T201 - for people
        raise SystemExit(1) from None


async def export(settings: ExportSettings, waiting: Waits = nullcontext) -> None:
    """Copy the version that `settings` name. Raises `VersionUnavailable` if the relay does not have it."""
    from ebbtide.types.weights import Holder
    from ebbtide.weight_relay.subscription import RelayUpstream
    from ebbtide.weights import ManifestLimits

    relay = RelayUpstream(settings.relay, settings.security, Holder(name="weights-export"), ManifestLimits())
    try:
        with waiting():
            version = await _look_up(relay, settings)
        await _copy(relay, version, Path(settings.folder), waiting)
    finally:
        await relay.close()


async def _look_up(relay: "Upstream", settings: ExportSettings) -> "StaticVersion":
    """The manifest, and the patch from the version's parent if the relay has it."""
    from ebbtide.types.weights import FetchPath
    from ebbtide.weight_relay.static_copy import StaticVersion

    manifest = await relay.manifest((settings.run, settings.policy), settings.version)
    patches: tuple[Patch, ...] = ()
    if parent := manifest.version.parent:
        step = FetchPath(start=parent, keyframe=False, via=(manifest.version.version,))
        try:
            _, patches = await relay.way(step, manifest)
        except VersionUnavailable:
            if not settings.dense:
                raise
    if not patches and not settings.dense:
        raise VersionUnavailable("the version has no parent, so there is no patch to export; export it with --dense")
    return StaticVersion(manifest=manifest, patches=patches, dense=settings.dense)


async def _copy(relay: "Upstream", version: "StaticVersion", folder: Path, waiting: Waits) -> None:
    from ebbtide.weight_relay.static_copy import StaticCopyWriter

    writer = await asyncio.to_thread(StaticCopyWriter, version, folder)
    pool, digests = relay.pool(), writer.missing
    try:
        for start in range(0, len(digests), _MOST):
            tiles = pool.pick().source.tiles(digests[start : start + _MOST])
            while (tile := await _next(tiles, waiting)) is not None:
                await asyncio.to_thread(writer.add, *tile)
        await asyncio.to_thread(writer.finish)
    except VersionUnavailable as error:
        text = (
            f"{error}; only keyframes have all dense tiles (`ebbtide run weights {version.manifest.run_id}` shows them)"
        )
        raise VersionUnavailable(text) from None
    finally:
        writer.close()
        await pool.close()
    number = version.manifest.version.version
    print(f"version {number}: {len(digests)} blobs, {writer.written} bytes in {folder}")  # noqa: T201 - for people


async def _next(tiles: AsyncIterator[tuple[bytes, bytes]], waiting: Waits) -> tuple[bytes, bytes] | None:
    with waiting():
        return await anext(tiles, None)


if __name__ == "__main__":
    main()
