"""Defines the metrics of a worker."""

from ebbtide import telemetry

TOKENS = telemetry.counter("worker_tokens_total", "tokens that left the engine, including lost and refused ones")
PROMPT_TOKENS = telemetry.counter(
    "worker_prompt_tokens_total",
    "tokens of prompts and partial responses given to the engine; `outcome`: read (prefilled), cached",
    ("outcome",),
)
RUNNING = telemetry.gauge("worker_running", "rollouts in the engine")
WAITING = telemetry.gauge("worker_waiting", "rollouts in the engine without a token of this attempt yet")
UNADMITTED = telemetry.gauge("worker_unadmitted", "rollouts that wait until the engine has memory for them")
RESERVED = telemetry.gauge(
    "worker_reserved_tokens", "context up to which rollouts have the engine's memory, over all of them"
)
PARKED = telemetry.counter("worker_parked_total", "rollouts that gave up their memory for others")
PREEMPTIONS = telemetry.counter("worker_preemptions_total", "times that the engine by itself took a rollout's memory")
UNACKNOWLEDGED = telemetry.gauge("worker_unacknowledged_tokens", "tokens generated and not yet acknowledged as stored")
FLUSH_SECONDS = telemetry.histogram("worker_flush_seconds", "tokens sent to acknowledged")
ATTEMPTS = telemetry.counter("worker_attempts_total", "ended attempts, by reason", ("outcome",))
INSTALLS = telemetry.counter("worker_installs_total", "policy versions; `outcome`: installed, refused", ("outcome",))
ENGINE_STARTS = telemetry.counter("worker_engine_starts_total", "engine restarts for another architecture")
PULL_SECONDS = telemetry.histogram("worker_pull_seconds", "version wanted to completely held and verified")
PULLED_BYTES = telemetry.counter(
    "worker_pulled_bytes_total", "bytes of weights fetched; `kind` of the source: relay, peer", ("kind",)
)
TILES = telemetry.counter(
    "worker_tiles_total", "tiles of wanted versions; `outcome`: fetched, reused (already present)", ("outcome",)
)
PHASE_SECONDS = telemetry.counter(
    "worker_weights_seconds_total",
    "seconds spent on weights; `phase`: pull, verify (digests, in their threads), pause",
    ("phase",),
)
SERVED_BYTES = telemetry.counter("worker_served_bytes_total", "bytes of weights served to other workers")
PAUSE_SECONDS = telemetry.histogram("worker_pause_seconds", "pause of generation for an install")
THROTTLED_SECONDS = telemetry.counter(
    "worker_throttled_seconds_total", "seconds that generation waited for late acknowledgements"
)
GRANTED = telemetry.gauge("worker_granted", "1 while a borrowed worker may generate")
PEER_STREAMS = telemetry.gauge("worker_peer_streams", "streams that serve weights to other workers now")
DRAFTS = telemetry.counter("worker_drafts_total", "drafts that the engine verified")
DRAFT_TOKENS = telemetry.counter(
    "worker_draft_tokens_total", "tokens of drafts; `outcome`: drafted, and accepted of these", ("outcome",)
)
DRAFT_TREE_BYTES = telemetry.gauge("worker_draft_tree_bytes", "memory of the groups' tokens that drafts are made from")
