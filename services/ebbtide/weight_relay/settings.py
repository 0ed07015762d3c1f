"""Defines the settings of the weight-relay."""

from typing import Annotated

from msgspec import Meta

from ebbtide.auth.security import ClientSecurity, ServerSettings
from ebbtide.runtime import ProcessSettings


class RelaySettings(ProcessSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A weight-relay's settings. Durations are seconds."""

    server: ServerSettings = ServerSettings.at("127.0.0.1:7610")
    data_dir: Annotated[str, Meta(description="folder of the relay's tiles and manifests")] = "relay-data"
    keep_versions: Annotated[
        int, Meta(ge=1, description="number of newest versions to keep of each policy of each run")
    ] = 4
    max_age_s: Annotated[
        float, Meta(ge=0, description="seconds to keep versions other than the newest; 0 keeps them without end")
    ] = 0.0
    budget_bytes: Annotated[int, Meta(ge=1 << 20, description="maximum bytes of all tiles on disk")] = 64 << 30
    run_quota_bytes: Annotated[int, Meta(ge=0, description="maximum bytes of each run; 0 sets no quota")] = 0
    stage_ttl_s: Annotated[
        float, Meta(gt=0, description="seconds of silence after which a publisher counts as dead")
    ] = 600.0
    abandoned_s: Annotated[
        float,
        Meta(
            gt=0, description="seconds without a reader after which a policy's newest version may make room for others"
        ),
    ] = 3600.0
    keyframe_every: Annotated[
        int, Meta(ge=1, description="number of patches after which the relay makes a keyframe of them")
    ] = 16
    keyframe_share: Annotated[
        float,
        Meta(gt=0, description="bytes of patches, as a fraction of the dense bytes, after which it makes one too"),
    ] = 0.5
    codec_threads: Annotated[
        int, Meta(ge=0, description="threads that make keyframes and compose patches; 0 takes half of the cores")
    ] = 0
    publisher_keys: Annotated[
        tuple[str, ...], Meta(description="RUN=KEY (hexadecimal) of publishers that are known beforehand")
    ] = ()
    allow_unsigned: Annotated[bool, Meta(description="accept unsigned versions of runs that have no key yet")] = False
    name: Annotated[str, Meta(description="unique name among relays and workers; host and port by default")] = ""
    site: Annotated[str, Meta(description="cluster or region that the relay belongs to")] = ""
    advertise: Annotated[
        str,
        Meta(
            description="address at which readers of the upstream may fetch from this relay; an empty string disables "
            "it"
        ),
    ] = ""
    upstream: Annotated[
        str, Meta(description="weight-relay (host:port) or static copy (URL) whose versions this relay mirrors")
    ] = ""
    upstream_security: ClientSecurity = ClientSecurity()
    upstream_runs: Annotated[
        tuple[str, ...], Meta(description="runs that it mirrors from upstream; all by default")
    ] = ()
    link_limits: Annotated[
        tuple[str, ...],
        Meta(
            description="SITE=BYTES_PER_S, a limit on what it sends to readers of a site; * stands for any other site"
        ),
    ] = ()
    egress_limit: Annotated[
        float, Meta(ge=0, description="maximum bytes per second of all that it sends; 0 sets no limit")
    ] = 0.0
    coordinator: Annotated[
        str,
        Meta(
            description="coordinators (HOST:PORT,HOST:PORT) to ask which runs have ended, so that their versions can "
            "be removed; by default the upstream is asked, if there is one",
            extra={"shared": True},
        ),
    ] = ""
    coordinator_security: ClientSecurity = ClientSecurity()
    keep_ended_s: Annotated[float, Meta(ge=0, description="seconds to keep the versions of a finished run")] = 0.0
    static_copies: Annotated[
        tuple[str, ...],
        Meta(description="URLs of static copies that readers use before this relay; not with an upstream"),
    ] = ()

    @property
    def follows_copy(self) -> bool:
        """Whether the upstream is a static copy, not a relay."""
        return self.upstream.startswith(("http://", "https://"))
