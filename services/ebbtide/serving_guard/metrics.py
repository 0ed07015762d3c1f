"""Declares the serving-guard's metrics of users' traffic. Those of borrowers (`borrowers`) and of a trainer's device
(`loan_keeper`) stand beside what they measure, because a guard registers only what its device's owner needs."""

from ebbtide import telemetry

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
_TPOT = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)

REQUESTS = telemetry.counter("guard_requests_total", "ended requests of users; `outcome`: ok, failed", ("outcome",))
INSIDE = telemetry.gauge("guard_requests_inside", "requests of users in flight")
TTFT_SECONDS = telemetry.histogram("guard_ttft_seconds", "users: arrival to first token", ("model",), _TTFT)
TPOT_SECONDS = telemetry.histogram("guard_tpot_seconds", "users: mean time per later token", ("model",), _TPOT)
ATTAINED = telemetry.counter(
    "guard_slo_total",
    "judged requests; `kind`: ttft, tpot; `outcome`: within, beyond the target",
    ("model", "kind", "outcome"),
)
LOAD = telemetry.gauge("guard_load", "share of the last minute with a user's request inside")
BUDGET_TOKENS = telemetry.gauge("guard_budget_tokens", "what the next rollout step may take")
DECISIONS = telemetry.counter("guard_states_total", "changes of the state that the budget follows from", ("state",))
HELD_SECONDS = telemetry.histogram("guard_held_seconds", "requests waiting for the end of a rollout step")
OBSERVE_FAILURES = telemetry.counter("guard_observe_failures_total", "failed reads of the engine's metrics")
REFUSED = telemetry.counter(
    "guard_refused_total", "requests and connections that the proxy refused, by HTTP status", ("status",)
)
CLIENTS_CUT = telemetry.counter(
    "guard_clients_cut_total",
    "connections ended by the guard; `reason`: room (to make room), memory (held most, beyond "
    "`max-held-bytes`), unread (answer left unread)",
    ("reason",),
)
CANCELLED = telemetry.counter("guard_cancelled_total", "requests whose client left before the end of the answer")
ENGINE_CONNECTS = telemetry.counter("guard_engine_connects_total", "connections opened to the serving engine")
ENGINE_FAILURES = telemetry.counter("guard_engine_failures_total", "requests that the serving engine did not answer")
LISTENER_FAILURES = telemetry.counter("guard_listener_failures_total", "errors in the guard's judgement of requests")
