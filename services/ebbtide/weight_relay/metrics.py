"""Defines the relay's metrics."""

from ebbtide import telemetry

VERSIONS = telemetry.gauge("relay_versions", "policy versions held")
KEYFRAMES = telemetry.gauge("relay_keyframes", "policy versions whose dense tiles are held")
PATCHES = telemetry.gauge("relay_patches", "patches between versions held")
BYTES_HELD = telemetry.gauge("relay_bytes", "bytes of all tiles on disk")
BYTES_IN = telemetry.counter("relay_received_bytes_total", "bytes of tiles stored")
BYTES_OUT = telemetry.counter("relay_sent_bytes_total", "bytes of tiles read for fetches")
CORRUPT = telemetry.counter("relay_damaged_tiles_total", "tiles found damaged on disk")
LINK_BYTES = telemetry.counter("relay_link_bytes_total", "bytes of blobs sent, by the readers' site", ("site",))
HOLDERS = telemetry.gauge("relay_holders", "copies, complete or arriving, that holders reported recently")
INSTALL_SECONDS = telemetry.histogram(
    "relay_install_seconds", "pauses of generation for installs, as holders report them"
)
ARRIVALS = telemetry.counter("relay_arrivals_total", "versions fetched from upstream, by outcome", ("outcome",))
ARRIVAL_SECONDS = telemetry.histogram(
    "relay_arrival_seconds", "a version's commit upstream, as reported, to its commit here"
)
UPSTREAM_FAILURES = telemetry.counter(
    "relay_upstream_failures_total", "errors of sources during arrivals, by name of the error", ("reason",)
)
REFUSALS = telemetry.counter(
    "relay_refusals_total",
    "refused messages of publishers; `reason`: malformed, digest, signature, conflict, capacity",
    ("reason",),
)
KEYFRAMES_MADE = telemetry.counter(
    "relay_keyframes_made_total", "versions whose dense tiles this relay made from patches"
)
COMPOSED = telemetry.counter("relay_composed_patches_total", "patches over several steps made here")
COMPOSED_BYTES = telemetry.counter("relay_composed_bytes_total", "bytes of the patches that were composed into others")
