"""What a coordinator counts. No label without a bound: never a run, a rollout or a worker."""

from collections.abc import Iterable

from ebbtide import telemetry
from ebbtide.coordinator.state import RunState, Session
from ebbtide.types.fleet import WorkerState

runs = telemetry.gauge("coordinator_runs", "live runs")
queued = telemetry.gauge("coordinator_rollouts_queued", "rollouts waiting for a worker")
running = telemetry.gauge("coordinator_rollouts_running", "rollouts given to workers")
workers = telemetry.gauge("coordinator_workers", "attached workers", ("state",))
attempts = telemetry.counter("coordinator_attempts_total", "attempts started")
resumptions = telemetry.counter("coordinator_resumptions_total", "attempts that went on from stored tokens")
requeued = telemetry.counter("coordinator_requeued_total", "attempts that ended without a finish")
finished = telemetry.counter("coordinator_finished_total", "rollouts finished by workers")
dead_letters = telemetry.counter("coordinator_dead_letters_total", "rollouts given up")
tokens = telemetry.counter("coordinator_tokens_appended_total", "tokens received from workers, repeats included")
appends = telemetry.counter("coordinator_append_acks_total", "deltas answered", ("outcome",))
append_seconds = telemetry.histogram("coordinator_append_seconds", "append message received to acknowledged")
placement_seconds = telemetry.histogram("coordinator_placement_seconds", "rollout queued to given to a worker")
install_seconds = telemetry.histogram(
    "coordinator_install_seconds", "policy versions as workers report them", ("phase",)
)


def observe(live: Iterable[RunState], sessions: Iterable[Session]) -> None:
    """Set the gauges."""
    states = list(live)
    runs.set(len(states))
    queued.set(sum(len(run.line) for run in states))
    running.set(sum(len(run.running) for run in states))
    count = dict.fromkeys(WorkerState, 0)
    for session in sessions:
        count[session.state] += 1
    for state, number in count.items():
        workers.labels(state.name.lower()).set(number)
