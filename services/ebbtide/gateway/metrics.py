"""Declares the gateway's metrics."""

from ebbtide import telemetry

REQUESTS = telemetry.counter("gateway_requests_total", "requests ended, by route", ("method", "outcome"))
ERRORS = telemetry.counter(
    "gateway_errors_total", "errors told to clients, by HTTP status; behind an answer's beginning, too", ("status",)
)
UNDER_WAY = telemetry.gauge("gateway_requests_under_way", "requests under way")
STREAMS = telemetry.gauge("gateway_streams", "answers that are streamed now")
LEFT = telemetry.counter("gateway_clients_left_total", "requests whose client left before the end of the answer")
FIRST_TOKEN_SECONDS = telemetry.histogram(
    "gateway_first_token_seconds", "a streamed request's arrival to the first tokens of its answer"
)
GAP_SECONDS = telemetry.histogram(
    "gateway_gap_seconds", "between two parts of a streamed answer with tokens, of all its completions together"
)
TOKENS = telemetry.counter("gateway_tokens_total", "tokens answered to clients")
