"""Declares the gateway's metrics."""

from ebbtide import telemetry

REQUESTS = telemetry.counter(
    "gateway_requests_total",
    "requests ended; `method`: the route; `outcome`: ok, refused (status below 500), failed, left (the client did)",
    ("method", "outcome"),
)
ERRORS = telemetry.counter(
    "gateway_errors_total",
    "errors reported to clients, by HTTP status; also those after streaming has begun",
    ("status",),
)
UNDER_WAY = telemetry.gauge("gateway_requests_under_way", "requests for text in flight")
STREAMS = telemetry.gauge("gateway_streams", "answers that are streamed now")
LEFT = telemetry.counter("gateway_clients_left_total", "requests whose client left before the end of the answer")
FIRST_TOKEN_SECONDS = telemetry.histogram(
    "gateway_first_token_seconds", "a streamed request's arrival to the first tokens of its answer"
)
GAP_SECONDS = telemetry.histogram(
    "gateway_gap_seconds", "time between two parts of a streamed answer with tokens, of all its completions together"
)
TOKENS = telemetry.counter("gateway_tokens_total", "tokens answered to clients")
