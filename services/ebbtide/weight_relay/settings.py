"""Defines the settings of the weight-relay."""

from typing import Annotated

from msgspec import Meta

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.runtime import ProcessSettings


class RelaySettings(ProcessSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A weight-relay's settings. Durations are seconds."""

    server: ServerSettings = ServerSettings.at("127.0.0.1:7610")
    data_dir: Annotated[str, Meta(description="directory of the relay's tiles and manifests")] = "relay-data"
    keep_versions: Annotated[int, Meta(ge=1, description="newest versions kept of each policy of each run")] = 4
    max_age_s: Annotated[
        float, Meta(ge=0, description="seconds for which versions but the newest are kept; 0: without end")
    ] = 0.0
    budget_bytes: Annotated[int, Meta(ge=1 << 20, description="bytes of all tiles kept on disk")] = 64 << 30
    run_quota_bytes: Annotated[int, Meta(ge=0, description="bytes kept of each run; 0: no quota")] = 0
    stage_ttl_s: Annotated[float, Meta(gt=0, description="seconds after which a silent publisher counts as dead")] = (
        600.0
    )
    abandoned_s: Annotated[
        float, Meta(gt=0, description="seconds unread after which a policy's newest version may make room for others")
    ] = 3600.0
    anchor_every: Annotated[int, Meta(ge=1, description="patches after which the relay makes an anchor of them")] = 16
    anchor_share: Annotated[
        float, Meta(gt=0, description="bytes of patches, as a share of the dense ones, after which it does so too")
    ] = 0.5
    codec_threads: Annotated[
        int, Meta(ge=0, description="threads that make anchors and compose patches; 0: half of the cores")
    ] = 0
    publisher_keys: Annotated[
        tuple[str, ...], Meta(description="RUN=KEY (hexadecimal) of publishers that are known beforehand")
    ] = ()
    allow_unsigned: Annotated[bool, Meta(description="take unsigned versions of runs that have no key yet")] = False
    name: Annotated[str, Meta(description="unique name among relays and workers; empty: host and port")] = ""
    site: Annotated[str, Meta(description="cluster or region that it belongs to")] = ""
    advertise: Annotated[
        str, Meta(description="address at which readers of the upstream may fetch here; empty: none")
    ] = ""
    upstream: Annotated[
        str, Meta(description="weight-relay (host:port) or static copy (URL) whose versions it brings here")
    ] = ""
    upstream_security: ClientSecurity = ClientSecurity()
    upstream_runs: Annotated[tuple[str, ...], Meta(description="runs that it follows upstream; none: all")] = ()
    link_limits: Annotated[
        tuple[str, ...],
        Meta(description="SITE=BYTES_PER_S of what it sends to readers of a site; *: of any other site"),
    ] = ()
    egress_limit: Annotated[float, Meta(ge=0, description="bytes per second of all that it sends; 0: no limit")] = 0.0
    coordinator: Annotated[
        str,
        Meta(
            description="coordinators (HOST:PORT,HOST:PORT) that say which runs have ended, whose versions go; "
            "empty: the upstream, if any",
            extra={"shared": True},
        ),
    ] = ""
    coordinator_security: ClientSecurity = ClientSecurity()
    keep_ended_s: Annotated[
        float, Meta(ge=0, description="seconds for which the versions of a run that finished are kept after its end")
    ] = 0.0
    static_copies: Annotated[
        tuple[str, ...],
        Meta(description="URLs of static copies that readers use before this relay; not with an upstream"),
    ] = ()

    @property
    def follows_copy(self) -> bool:
        """Whether the upstream is a static copy, not a relay."""
        return self.upstream.startswith(("http://", "https://"))
