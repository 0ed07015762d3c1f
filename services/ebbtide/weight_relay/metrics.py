"""What the relay measures."""

from ebbtide import telemetry

VERSIONS = telemetry.gauge("relay_versions", "Policy versions held")
BYTES_HELD = telemetry.gauge("relay_bytes", "Bytes of all tiles on disk")
BYTES_IN = telemetry.counter("relay_received_bytes_total", "Bytes of tiles stored")
BYTES_OUT = telemetry.counter("relay_sent_bytes_total", "Bytes of tiles read for fetches")
CORRUPT = telemetry.counter("relay_damaged_tiles_total", "Tiles found damaged on disk")
