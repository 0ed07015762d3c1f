"""Defines the relay's metrics."""

from ebbtide import telemetry

VERSIONS = telemetry.gauge("relay_versions", "Policy versions held")
ANCHORS = telemetry.gauge("relay_anchors", "Policy versions whose dense tiles are held")
PATCHES = telemetry.gauge("relay_patches", "Patches between versions held")
BYTES_HELD = telemetry.gauge("relay_bytes", "Bytes of all tiles on disk")
BYTES_IN = telemetry.counter("relay_received_bytes_total", "Bytes of tiles stored")
BYTES_OUT = telemetry.counter("relay_sent_bytes_total", "Bytes of tiles read for fetches")
CORRUPT = telemetry.counter("relay_damaged_tiles_total", "Tiles found damaged on disk")
LINK_BYTES = telemetry.counter("relay_link_bytes_total", "Bytes of blobs sent, by the readers' site", ("site",))
HOLDERS = telemetry.gauge("relay_holders", "Copies, whole or arriving, that holders told of lately")
INSTALL_SECONDS = telemetry.histogram("relay_install_seconds", "Stops of generation for installs, as holders told them")
ARRIVALS = telemetry.counter("relay_arrivals_total", "Versions brought from upstream", ("outcome",))
ARRIVAL_SECONDS = telemetry.histogram(
    "relay_arrival_seconds", "From a version's commit upstream, as it was heard of, to its commit here"
)
UPSTREAM_FAILURES = telemetry.counter("relay_upstream_failures_total", "Errors of sources during arrivals", ("reason",))
REFUSALS = telemetry.counter("relay_refusals_total", "What publishers sent and was refused", ("reason",))
ANCHORS_MADE = telemetry.counter("relay_anchors_made_total", "Versions whose dense tiles were made here from patches")
COMPOSED = telemetry.counter("relay_composed_patches_total", "Patches of several steps made here")
COMPOSED_BYTES = telemetry.counter("relay_composed_bytes_total", "Bytes of the patches that were composed to others")
