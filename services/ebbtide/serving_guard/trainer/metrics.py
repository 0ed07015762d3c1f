"""Declares the serving-guard's metrics of a trainer's device."""

from ebbtide import telemetry

_RETURNS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

DEVICE_HELD = telemetry.gauge("guard_device_held", "1 while the trainer has its device")
DEVICE_SECONDS = telemetry.counter("guard_device_seconds_total", "seconds by who may use the device", ("state",))
TAKE_BACKS = telemetry.counter("guard_take_backs_total", "times that the trainer took its device back")
COMPUTE_BACK_SECONDS = telemetry.histogram(
    "guard_compute_back_seconds", "a take-back until no engine steps any more", buckets=_RETURNS
)
MEMORY_BACK_SECONDS = telemetry.histogram(
    "guard_memory_back_seconds", "a take-back until engines have given up memory", buckets=_RETURNS
)
OWNERS_REFUSED = telemetry.counter("guard_owners_refused_total", "trainers that were refused the device", ("reason",))
