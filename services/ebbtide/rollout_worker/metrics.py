"""Defines the metrics of a worker."""

from ebbtide import telemetry

TOKENS = telemetry.counter("worker_tokens_total", "tokens that left the engine")
PROMPT_TOKENS = telemetry.counter(
    "worker_prompt_tokens_total", "tokens of prompts and partial responses that the engine read or had", ("outcome",)
)
RUNNING = telemetry.gauge("worker_running", "rollouts in the engine")
WAITING = telemetry.gauge("worker_waiting", "rollouts in the engine without a token of this attempt yet")
UNADMITTED = telemetry.gauge("worker_unadmitted", "rollouts that wait until the engine has memory for them")
RESERVED = telemetry.gauge("worker_reserved_tokens", "context up to which rollouts have the engine's memory")
PARKED = telemetry.counter("worker_parked_total", "rollouts that gave up their memory for others")
PREEMPTIONS = telemetry.counter("worker_preemptions_total", "times that the engine by itself took a rollout's memory")
UNACKNOWLEDGED = telemetry.gauge("worker_unacknowledged_tokens", "tokens generated and not yet stored")
FLUSH_SECONDS = telemetry.histogram("worker_flush_seconds", "from sending tokens to their acknowledgement")
ATTEMPTS = telemetry.counter("worker_attempts_total", "attempts ended", ("outcome",))
INSTALLS = telemetry.counter("worker_installs_total", "policy versions installed or refused", ("outcome",))
ENGINE_STARTS = telemetry.counter("worker_engine_starts_total", "engines restarted for another architecture")
PULL_SECONDS = telemetry.histogram("worker_pull_seconds", "from wanting a version to holding all of it, verified")
PULLED_BYTES = telemetry.counter("worker_pulled_bytes_total", "bytes of weights fetched, by their source", ("kind",))
TILES = telemetry.counter("worker_tiles_total", "tiles of wanted versions, fetched or there already", ("outcome",))
PHASE_SECONDS = telemetry.counter(
    "worker_weights_seconds_total", "seconds for weights: of pulls, of digests in their threads, of pauses", ("phase",)
)
SERVED_BYTES = telemetry.counter("worker_served_bytes_total", "bytes of weights served to other workers")
PAUSE_SECONDS = telemetry.histogram("worker_pause_seconds", "generation standing still for an install")
THROTTLED_SECONDS = telemetry.counter("worker_throttled_seconds_total", "generation held because the store was slow")
GRANTED = telemetry.gauge("worker_granted", "whether a borrowed worker may generate")
PEER_STREAMS = telemetry.gauge("worker_peer_streams", "streams in which weights are served to other workers now")
DRAFTS = telemetry.counter("worker_drafts_total", "drafts that the engine verified")
DRAFT_TOKENS = telemetry.counter("worker_draft_tokens_total", "draft tokens verified, and those accepted", ("outcome",))
DRAFT_TREE_BYTES = telemetry.gauge("worker_draft_tree_bytes", "memory of the suffix trees of groups")
