"""Declares the gateway's metrics."""

from ebbtide import telemetry

REQUESTS = telemetry.counter("gateway_requests_total", "requests ended, by route", ("method", "outcome"))
UNDER_WAY = telemetry.gauge("gateway_requests_under_way", "requests under way")
LEFT = telemetry.counter("gateway_clients_left_total", "requests whose client left before the end of the answer")
FIRST_TOKEN_SECONDS = telemetry.histogram(
    "gateway_first_token_seconds", "a streamed request's arrival to the first tokens of its answer"
)
TOKENS = telemetry.counter("gateway_tokens_total", "tokens answered to clients")
