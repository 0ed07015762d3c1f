"""Defines the coordinator's metrics. Every label is bounded: no rollouts or workers, and of runs only live ones."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ebbtide import telemetry
from ebbtide.coordinator.state.coordinator_state import CoordinatorState
from ebbtide.coordinator.state.run_state import RunState
from ebbtide.errors import StoreUnavailable
from ebbtide.store.records import UNEXPECTED
from ebbtide.types.fleet import BorrowedState, EndReason, Worker, WorkerState

if TYPE_CHECKING:  # a simulator counts too, without a store
    from ebbtide.store.store import Store

#: Beyond so many live runs, the youngest have no gauges.
_RUNS_SHOWN: Final = 200
#: Prometheus scrapes so often by default.
_MEASURE_EVERY_S: Final = 15.0
_WAITS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 10.0, 30.0)

leads = telemetry.gauge("coordinator_leads", "1 while this coordinator holds the fleet's lease, else 0")
runs = telemetry.gauge("coordinator_runs", "live runs")
queued = telemetry.gauge("coordinator_rollouts_queued", "rollouts waiting for a worker")
running = telemetry.gauge("coordinator_rollouts_running", "rollouts assigned to workers")
workers = telemetry.gauge(
    "coordinator_workers",
    "workers attached, or lost within the last minute; `state`: booting, ready, installing, draining, lost, "
    "suspected, quarantined",
    ("state",),
)
run_share = telemetry.gauge("coordinator_run_share", "a live run's share of the tokens made recently", ("run",))
run_due = telemetry.gauge("coordinator_run_share_due", "share of the fleet that a live run is due now", ("run",))
run_workers = telemetry.gauge("coordinator_run_workers", "workers that are to serve a live run", ("run",))
_labelled: set[str] = set()  # runs with a label in these gauges
attempts = telemetry.counter("coordinator_attempts_total", "attempts started")
resumptions = telemetry.counter("coordinator_resumptions_total", "attempts that continued from stored tokens")
requeued = telemetry.counter("coordinator_requeued_total", "attempts that ended without a finish, moves included")
moved = telemetry.counter("coordinator_moved_total", "attempts taken from a worker to balance the fleet")
balanced = telemetry.counter(
    "coordinator_balanced_total", "running rollouts recalled so that the step ends sooner on another worker"
)
moves_kept = telemetry.gauge(
    "coordinator_moves_kept",
    "share of the tokens promised by recent moves that their rollouts made until the moves paid back; of the "
    "live runs the least",
)
moves_stopped = telemetry.gauge(
    "coordinator_moves_stopped",
    "live runs whose running rollouts stay where they are, since recent moves made less than 0.6 of what they promised",
)
reclaims = telemetry.counter(
    "coordinator_reclaims_total", "reclaims of borrowed workers that lasted long enough to be reported"
)
loop_lag = telemetry.gauge(
    "coordinator_loop_lag_seconds", "lag of the coordinator's event loop, at most within the last second"
)
heartbeat_delay = telemetry.gauge(
    "coordinator_heartbeat_delay_seconds",
    "delay of heartbeats against the earliest, median of the last second: messages queue where it grows",
)
shedding = telemetry.gauge(
    "coordinator_shedding",
    "1 while this work waits because the coordinator is late; `kind`, in the order in which they give way: "
    "starts, moves, forecasts, views (and submits of more than 64 rollouts), acknowledgements; heartbeats "
    "never wait",
    ("kind",),
)
borrowed = telemetry.gauge(
    "coordinator_borrowed_workers",
    "attached borrowed workers; `state`: granted, reclaimed, asleep, given_up",
    ("state",),
)
tokens_resumed = telemetry.counter(
    "coordinator_tokens_resumed_total", "stored tokens from which attempts continued: saved, not generated again"
)
tokens_lost = telemetry.counter(
    "coordinator_tokens_lost_total", "tokens lost at most with workers that went without notice"
)
rollout_attempts = telemetry.histogram(
    "coordinator_rollout_attempts", "attempts of each rollout that a worker finished", buckets=(1, 2, 3, 5, 10)
)
detection_seconds = telemetry.histogram(
    "coordinator_detection_seconds", "a worker's last sign of life to its loss", buckets=_WAITS
)
resume_seconds = telemetry.histogram(
    "coordinator_resume_seconds", "rollout back in the queue to the first token of its next attempt", buckets=_WAITS
)
finished = telemetry.counter("coordinator_finished_total", "rollouts that workers finished")
dead_letters = telemetry.counter("coordinator_dead_letters_total", "rollouts that became dead letters")
tokens = telemetry.counter("coordinator_tokens_appended_total", "tokens received from workers, repeats included")
appends = telemetry.counter(
    "coordinator_append_acks_total", "answered deltas; `outcome`: stored, gap, superseded", ("outcome",)
)
append_seconds = telemetry.histogram("coordinator_append_seconds", "append message received to acknowledged")
interactive_rollouts = telemetry.gauge(
    "coordinator_interactive_rollouts",
    "interactive rollouts assigned to workers",
)
interactive_flush_seconds = telemetry.gauge(
    "coordinator_interactive_flush_seconds",
    "least time between two messages of a worker for its interactive rollouts; above 0.05: there are more of "
    "them than `interactive_rollouts`",
)
interactive_slots = telemetry.gauge(
    "coordinator_interactive_slots_reserved", "free slots reserved for interactive rollouts (`interactive_slots`)"
)
token_readers = telemetry.gauge("coordinator_token_readers", "open `StreamTokens` streams")
token_chunks = telemetry.counter(
    "coordinator_token_chunks_total",
    "messages to `StreamTokens` readers; `kind`: `pushed` from the append, `read` from the store",
    ("kind",),
)
placement_seconds = telemetry.histogram("coordinator_placement_seconds", "rollout queued to assigned")
interactive_placement_seconds = telemetry.histogram(
    "coordinator_interactive_placement_seconds", "interactive rollout queued to assigned"
)
engine_starts = telemetry.counter(
    "coordinator_engine_starts_total", "engines of workers restarted for another architecture"
)
install_seconds = telemetry.histogram(
    "coordinator_install_seconds",
    "duration of installs as workers report them; `phase`: `pull` during generation, `pause` without",
    ("phase",),
)
store_away_seconds = telemetry.gauge(
    "coordinator_store_away_seconds", "how long the store has not answered; 0: it answers"
)
store_bytes = telemetry.gauge("coordinator_store_bytes", "memory that Redis uses (`used_memory`)")
store_limit_bytes = telemetry.gauge("coordinator_store_limit_bytes", "Redis's `maxmemory`; 0: no limit")
quota_used = telemetry.gauge("coordinator_quota_used", "largest share of its quota that a live run has used")
trajectories = telemetry.gauge("coordinator_trajectories_waiting", "trajectories that no trainer has committed yet")
length_forecasts = telemetry.counter(
    "coordinator_length_forecasts_total", "responses that ended, and whose length had been forecast at their start"
)
length_forecasts_covered = telemetry.counter(
    "coordinator_length_forecasts_covered_total",
    "responses whose length was within its forecast interval, which is to hold four in five",
)
requests = telemetry.counter("coordinator_requests_total", "completions that gateways' clients asked for")
sessions = telemetry.gauge("coordinator_sessions", "open sessions of gateways' clients")


def count_requeued(why: EndReason, attempts: int, lost: int) -> None:
    """Count attempts that ended together, and the tokens lost with them at most."""
    requeued.inc(attempts)
    tokens_lost.inc(lost)
    if why.moved:
        moved.inc(attempts)
    if why.noticed_s is not None:
        detection_seconds.observe(why.noticed_s)


def observe(live: Iterable[RunState], fleet: Iterable[Worker]) -> None:
    """Set the gauges."""
    states = list(live)
    _observe_shares(states[:_RUNS_SHOWN])
    for run in states:
        covered, ended = run.lengths.forecasts.coverage.take()
        length_forecasts.inc(ended)
        length_forecasts_covered.inc(covered)
        balanced.inc(run.moves.take_moves())
    moves_kept.set(min((run.moves.kept for run in states), default=1.0))
    moves_stopped.set(sum(not run.moves.trusted for run in states))
    runs.set(len(states))
    queued.set(sum(len(run.queue) for run in states))
    running.set(sum(len(run.running) for run in states))
    count = dict.fromkeys(WorkerState, 0)
    present = list(fleet)
    for worker in present:
        count[worker.state] += 1
    for state, number in count.items():
        workers.labels(state.name.lower()).set(number)
    lent = dict.fromkeys(("granted", "reclaimed", "asleep", "given_up"), 0)
    for worker in present:
        if worker.borrowed is not None and worker.state not in {WorkerState.LOST, WorkerState.SUSPECTED}:
            lent[_lent(worker, worker.borrowed)] += 1
    for name, number in lent.items():
        borrowed.labels(name).set(number)


async def measure_for_ever(state: CoordinatorState, store: "Store") -> None:
    """Ask the store regularly how full it is, and what waits in it."""
    store_away_seconds.set_function(lambda: store.link.away_s)
    while True:
        with suppress(StoreUnavailable):  # the last figures stay; `store_away_seconds` shows their age
            await measure(state, store)
        await asyncio.sleep(_MEASURE_EVERY_S)


async def measure(state: CoordinatorState, store: "Store") -> None:
    """Set the gauges, without runs whose data is broken. Raises `StoreUnavailable`."""
    room = await store.memory_usage()
    held = dict[RunState, tuple[int, int, int]]()
    for run in state.at_work(state.clock()):
        with suppress(*UNEXPECTED):
            held[run] = await store.runs.waiting(run.run_id)
    store_bytes.set(room.used)
    store_limit_bytes.set(room.limit)
    shares = (used / run.spec.quota_bytes for run, (used, _, _) in held.items())
    quota_used.set(max(shares, default=0.0))
    trajectories.set(sum(count for _, count, _ in held.values()))
    sessions.set(sum(count for _, _, count in held.values()))


def _observe_shares(shown: Sequence[RunState]) -> None:
    live = {run.run_id for run in shown}
    for gone in _labelled - live:
        for gauge in (run_share, run_due, run_workers):
            gauge.remove(gone)
    _labelled.clear()
    _labelled.update(live)
    for run in shown:
        run_share.labels(run.run_id).set(run.share.lately)
        run_due.labels(run.run_id).set(run.share.due)
        run_workers.labels(run.run_id).set(run.share.workers)


def _lent(worker: Worker, said: BorrowedState) -> str:
    if worker.given_up:
        return "given_up"
    return "asleep" if said.asleep else "granted" if said.granted else "reclaimed"
