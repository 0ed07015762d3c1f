"""Tracks a run: brings what its events say of steps and evaluations to the trackers that people plot them with.

The trainer reports each step as an event, and the driver each evaluation. `RunTracking` reads the run's events back, so
every tracker holds what the run says of itself, and nothing of a step waits for a tracker. Names are those of TRL's
`GRPOTrainer` where it has the figure (read in its source, 1.x of July 2026).

Invariant: `metrics.jsonl` has one line for each tracked event, in the events' order, with the event's cursor, and is
written last. A restarted trainer reads on after the last line, so a kill between two trackers repeats one event in the
others. What a trainer that resumed trains again comes again, after a line of the kind `resumed`.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Literal, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.client import Client
from ebbtide.errors import EbbtideError
from ebbtide.runtime import Aside
from ebbtide.telemetry import counter, get_logger
from ebbtide.types.rollout import Trajectory
from ebbtide.types.run import RunEvent
from ebbtide.types.tokens import unpack_ids, unpack_tokens

log = get_logger(__name__)

_failures = counter(
    "trainer_tracker_failures_total", "records that a tracker did not take; the run goes on without them", ("kind",)
)


class Figure(NamedTuple):
    """A figure of trackers. `source`: the value of the event, or the counter of the run, that it is; empty: neither."""

    name: str
    source: str
    meaning: str
    in_trl: bool = False


#: Of each optimiser step. A value that is not named here keeps its name: another trainer may report what it wants.
STEP_FIGURES: Final = (
    Figure("reward", "reward", "mean reward of the step's episodes", in_trl=True),
    Figure("reward_std", "reward_std", "standard deviation of these rewards", in_trl=True),
    Figure("frac_reward_zero_std", "equal_reward_share", "share of groups whose rewards are all equal", in_trl=True),
    Figure("accuracy", "accuracy", "share of answers that are right, if the environment counts them"),
    Figure("completions/mean_length", "response_length", "mean sampled tokens of an episode", in_trl=True),
    Figure("completions/min_length", "response_length_min", "fewest sampled tokens of an episode", in_trl=True),
    Figure("completions/max_length", "response_length_max", "most sampled tokens of an episode", in_trl=True),
    Figure("completions/clipped_ratio", "truncated_share", "share of episodes that ended by length", in_trl=True),
    Figure("completions/mean_terminated_length", "terminated_length", "mean over the episodes that ended", in_trl=True),
    Figure("loss", "loss", "policy loss, with the KL term if there is one; mean over updates", in_trl=True),
    Figure("entropy", "entropy", "mean entropy of the policy at sampled tokens, in nats", in_trl=True),
    Figure("kl", "kl", "KL to the run's `model`, in nats; only with `trainer.kl_coefficient`", in_trl=True),
    Figure("clip_ratio/region_mean", "clip_share", "share of sampled tokens whose ratio was clipped", in_trl=True),
    Figure("grad_norm", "grad_norm", "norm of the gradient before clipping; mean over updates", in_trl=True),
    Figure("learning_rate", "learning_rate", "learning rate of the last update", in_trl=True),
    Figure(
        "sampling/sampling_logp_difference/mean",
        "logprob_gap",
        "mismatch: mean absolute difference of workers' and trainer's logprobs at fresh tokens, in nats",
        in_trl=True,
    ),
    Figure(
        "sampling/sampling_logp_difference/p99",
        "logprob_gap_p99",
        "99th percentile of these differences, rounded up by at most 7.5 %",
    ),
    Figure("sampling/kl", "logprob_gap_kl", "estimated KL from the workers' distribution to the trainer's, in nats"),
    Figure(
        "sampling/importance_sampling_ratio/mean", "importance_weight", "mean importance weight of tokens", in_trl=True
    ),
    Figure("staleness/mean", "staleness_mean", "mean number of versions by which tokens were older than the weights"),
    Figure("staleness/max", "staleness_max", "the largest such number"),
    Figure("tokens/trained", "tokens", "sampled tokens that the step trained on"),
    Figure("tokens/stale", "stale_tokens", "those of them that an older version sampled"),
    Figure("rollouts/trained", "trained", "rollouts that the step trained on"),
    Figure("rollouts/taught", "taught", "samples that had an advantage other than 0, or all with a KL term"),
    Figure("policy_version", "version", "the version that the step's weights were published as"),
    Figure("time/wait", "seconds_wait", "seconds in which the trainer waited for trajectories"),
    Figure("time/train", "seconds_train", "seconds of gradients and updates"),
    Figure("time/publish", "seconds_publish", "seconds in which the trainer waited for its weights to be published"),
    Figure("time/checkpoint", "seconds_checkpoint", "seconds in which the trainer waited for a checkpoint"),
    Figure("time/overlapped", "overlapped_s", "seconds of training before the last group came; with streaming"),
    Figure("weights/bytes", "publish_bytes", "bytes of the published version"),
    Figure("weights/dense_bytes", "publish_dense_bytes", "bytes of a full checkpoint"),
    Figure("weights/density", "publish_density", "share of elements that changed"),
    Figure("weights/pause_s", "publish_pause_s", "seconds in which tensors were copied"),
    Figure("weights/publish_s", "publish_seconds", "seconds until the relay had the version"),
    Figure("weights/patch", "publish_patch", "1 for a patch, 0 for a full version"),
    Figure("lending/lent_s", "lent_s", "seconds in which the trainer lent its device"),
    Figure("lending/take_back_s", "take_back_s", "seconds until it had its device back"),
    Figure("lending/window_cuts", "window_cuts", "how often the window was cut while groups were missing"),
    Figure("lending/missing_groups", "window_missing_groups", "groups that were missing at the last cut"),
)
#: Computed from those above.
DERIVED_FIGURES: Final = (
    Figure("rewards/ENVIRONMENT/mean", "", "`reward`, under the name of the run's environment", in_trl=True),
    Figure("rewards/ENVIRONMENT/std", "", "`reward_std`, under the name of the run's environment", in_trl=True),
    Figure("step_time", "", "seconds of the step: the sum of `time/wait`, `train`, `publish` and `checkpoint`"),
    Figure("tokens_per_second", "", "`tokens/trained` over `step_time`"),
    Figure("training_tok/s", "", "`tokens/trained` over `time/train`", in_trl=True),
)
#: Of the whole run so far, when the step's event is read.
RUN_FIGURES: Final = (
    Figure("rollouts/attempts", "attempts", "attempts at rollouts so far"),
    Figure("rollouts/preempted", "", "rollouts that were resumed so far: their worker was preempted, lost or relieved"),
    Figure("rollouts/resumed_midway", "resumed_midway", "those of them that resumed after stored tokens"),
    Figure("rollouts/moved", "moved", "those of them that were moved to balance the fleet"),
    Figure("tokens/stored", "tokens_stored", "tokens stored so far"),
    Figure("tokens/saved", "tokens_resumed", "tokens that did not have to be regenerated so far"),
    Figure(
        "tokens/regenerated",
        "tokens_lost_at_most",
        "upper bound on the tokens that were regenerated so far: lost with workers before they were stored",
    ),
)
#: Of each evaluation.
EVALUATION_FIGURES: Final = (
    Figure("eval_reward", "mean_reward", "mean reward over the evaluation's problems", in_trl=True),
    Figure("eval_accuracy", "accuracy", "share of answers that are right"),
    Figure("eval_completions/mean_length", "mean_length", "mean sampled tokens of a problem", in_trl=True),
    Figure("eval_problems", "problems", "problems that have a reward"),
    Figure("eval_answers", "answers", "answers that were asked for"),
    Figure("eval_failed", "failed", "problems without a reward"),
    Figure("eval_policy_version", "version", "the version that was evaluated"),
)
_STEP_NAMES: Final = {figure.source: figure.name for figure in STEP_FIGURES}
_EVALUATION_NAMES: Final = {figure.source: figure.name for figure in EVALUATION_FIGURES}
_PHASES: Final = ("time/wait", "time/train", "time/publish", "time/checkpoint")


def step_figures(values: Mapping[str, float], *, environment: str) -> dict[str, float]:
    """Returns the figures of a step from its event's values."""
    found = {_STEP_NAMES.get(name, name): value for name, value in values.items() if name != "step"}
    for kind, source in (("mean", "reward"), ("std", "reward_std")):
        if source in found:
            found[f"rewards/{environment}/{kind}"] = found[source]
    tokens, seconds = found.get("tokens/trained"), sum(found.get(name, 0.0) for name in _PHASES)
    if seconds:
        found["step_time"] = seconds
    if tokens is not None and seconds:
        found["tokens_per_second"] = tokens / seconds
    if tokens is not None and (training := found.get("time/train")):
        found["training_tok/s"] = tokens / training
    return found


def evaluation_figures(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the figures of an evaluation from its event's values."""
    return {_EVALUATION_NAMES.get(name, f"eval_{name}"): value for name, value in values.items() if name != "step"}


def run_figures(counters: Mapping[str, int], *, preempted: int) -> dict[str, float]:
    """Returns the figures of the whole run so far. `preempted`: the rollouts that were resumed."""
    found = {figure.name: float(counters.get(figure.source, 0)) for figure in RUN_FIGURES if figure.source}
    return found | {"rollouts/preempted": float(preempted)}


#: Characters of a prompt or a response in a table.
_MOST_TEXT: Final = 8_000


class Sample(Struct, frozen=True, kw_only=True):
    """A row of the table of samples."""

    step: int
    group: str
    episode: str
    prompt: str
    completion: str
    reward: float
    tokens: int  # sampled ones
    versions: str  # that sampled them, as "4" or "3-4"


def spread(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Picks `count` trajectories evenly from the worst reward to the best, both included if there are two."""
    ordered = sorted(trajectories, key=lambda one: (one.reward, one.episode_id))
    if count >= len(ordered):
        return ordered
    if count <= 1:
        return ordered[:count]
    return [ordered[at * (len(ordered) - 1) // (count - 1)] for at in range(count)]


def sample_row(trajectory: Trajectory, step: int, decode: Callable[[Sequence[int]], str]) -> Sample:
    """Returns the row of a trajectory of `step`; `decode` makes token ids text."""
    tokens = unpack_tokens(trajectory.tokens)
    sampled = [version for version, made in zip(tokens["version"].tolist(), trajectory.loss_mask, strict=True) if made]
    first, last = min(sampled, default=0), max(sampled, default=0)
    return Sample(
        step=step,
        group=trajectory.group_id,
        episode=trajectory.episode_id,
        prompt=decode(unpack_ids(trajectory.prompt_ids).tolist())[:_MOST_TEXT],
        completion=decode(tokens["id"].tolist())[:_MOST_TEXT],
        reward=trajectory.reward,
        tokens=len(sampled),
        versions=str(first) if first == last else f"{first}-{last}",
    )


class Record(Struct, frozen=True, kw_only=True):
    """What trackers are given of one event."""

    kind: Literal["step", "evaluation", "resumed"]  # resumed: the steps after `step` are trained again
    step: int  # optimiser steps in the weights
    cursor: str  # of the event
    seconds: float  # since the run's submission
    figures: dict[str, float] = {}
    samples: tuple[Sample, ...] = ()
    preempted: int = 0  # rollouts that were resumed up to the event, for who goes on from here


class Tracker(Protocol):
    """Takes a run's records, in a thread of its own. What it raises costs that record."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Progress(NamedTuple):
    """How far a run was tracked by earlier processes."""

    cursor: str = ""
    preempted: int = 0


#: Bounds on one record of one tracker, and on failures in a row, after which a tracker is left alone.
_WRITE_S: Final = 30.0
_MOST_FAILURES: Final = 3
#: Steps whose samples wait for their event.
_WAITING_STEPS: Final = 16
#: An event that was read later than this after it was reported says nothing of the run's counters at its time.
_FRESH_S: Final = 60.0


class _TrackerThread:
    """Runs one tracker, until it hangs or fails time and again."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._name, self._make = name, make
        self._thread = Aside(f"tracker {name}")
        self._tracker: Tracker | None = None
        self._failed = 0

    async def write(self, record: Record) -> None:
        if self._failed >= _MOST_FAILURES:
            _failures.labels(self._name).inc()
            return
        try:
            async with asyncio.timeout(_WRITE_S):
                await self._thread.do(partial(self._write, record))
            self._failed = 0
        except TimeoutError:
            self._failed = _MOST_FAILURES
            self._tell(f"took longer than {_WRITE_S:g} s, and is left alone from now on", record)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the run goes on
            self._failed += 1
            self._tell(f"{type(error).__name__}: {error}", record)

    def _write(self, record: Record) -> None:
        if self._tracker is None:
            self._tracker = self._make()
        self._tracker.write(record)

    def _close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()

    def _tell(self, reason: str, record: Record) -> None:
        _failures.labels(self._name).inc()
        log.warning("a tracker failed", tracker=self._name, step=record.step, reason=reason)

    async def close(self, timeout_s: float) -> None:
        """Lets the tracker take the record that it is at, and finish. Waits at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._thread.do(self._close)
        except Exception as error:  # noqa: BLE001 - as above
            log.warning("a tracker failed to close", tracker=self._name, reason=f"{type(error).__name__}: {error}")
        await self._thread.close(0.0)


class RunTracking:
    """Tracks one run, from where earlier processes stopped. Its trackers' failures end nothing."""

    def __init__(
        self,
        client: Client,
        run_id: str,
        *,
        environment: str,
        trackers: Mapping[str, Callable[[], Tracker]],
        progress: Progress,
        samples: int,
    ) -> None:
        """`trackers`: by name, in the order in which each is given a record; made when the first one comes. `samples`:
        rows of each step's table."""
        self._client, self._run_id, self._environment = client, run_id, environment
        self._threads = [_TrackerThread(name, make) for name, make in trackers.items()]
        self._cursor, self._preempted = progress
        self._count = samples
        self._samples: dict[int, Callable[[], list[Sample]]] = {}
        self._odd = False  # an event was not understood, which the log says once

    def keep_samples(
        self, step: int, trajectories: Sequence[Trajectory], decode: Callable[[Sequence[int]], str]
    ) -> None:
        """Keeps some of what `step` trained on until its event is read. Call it before the step is reported. `decode`
        makes token ids text, in another thread."""
        picked = spread(trajectories, self._count)
        self._samples[step] = lambda: [sample_row(one, step, decode) for one in picked]
        for old in list(self._samples)[:-_WAITING_STEPS]:
            del self._samples[old]

    async def run(self) -> None:
        """Tracks the run until it has ended, or as long as its events can be read. Leaves out events that it does not
        understand."""
        try:
            async for event in self._client.watch(self._run_id, self._cursor):
                if (record := await self._understood(event)) is not None:
                    record = replace(record, preempted=self._preempted)
                    for thread in self._threads:
                        await thread.write(record)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
            log.warning("the run is not tracked any more", reason=f"{type(error).__name__}: {error}")

    async def _understood(self, event: RunEvent) -> Record | None:
        try:
            return await self._record(event)
        except EbbtideError:
            raise
        except Exception as error:  # noqa: BLE001 - of values of any trainer, such as a step that is no number
            if not self._odd:
                reason = f"{type(error).__name__}: {error}"
                log.warning("events that are not understood are not tracked", kind=event.kind, reason=reason)
            self._odd = True
            return None

    async def close(self, timeout_s: float) -> None:
        """Lets the trackers finish, in at most `timeout_s` each. `run` must be over."""
        await asyncio.gather(*(thread.close(timeout_s) for thread in self._threads))

    async def _record(self, event: RunEvent) -> Record | None:
        step = int(event.values.get("step", 0))
        if event.kind == "resumed" and "rollout" in event.labels:
            self._preempted += 1
        elif event.kind == "resumed":
            return Record(kind="resumed", step=step, cursor=event.cursor, seconds=event.age_s)
        elif event.kind == "evaluation":
            figures = evaluation_figures(event.values)
            return Record(kind="evaluation", step=step, cursor=event.cursor, seconds=event.age_s, figures=figures)
        elif event.kind == "step":
            figures = step_figures(event.values, environment=self._environment) | await self._of_run(event)
            return Record(
                kind="step",
                step=step,
                cursor=event.cursor,
                seconds=event.age_s,
                figures=figures,
                samples=tuple(await asyncio.to_thread(self._rows, step)),
            )
        return None

    async def _of_run(self, event: RunEvent) -> dict[str, float]:
        """The run's figures at a step's event; none for an event of long ago."""
        run = await self._client.run(self._run_id)
        if run.age_s - event.age_s > _FRESH_S:
            return {}
        return run_figures(run.counters, preempted=self._preempted)

    def _rows(self, step: int) -> list[Sample]:
        try:
            return self._samples.pop(step, list)()
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything, and figures matter more
            log.warning("a step has no samples", step=step, reason=f"{type(error).__name__}: {error}")
            return []


def all_figures() -> Iterator[tuple[str, Sequence[Figure]]]:
    """All figures, by what they are of."""
    yield "Of each step", STEP_FIGURES
    yield "Computed from these", DERIVED_FIGURES
    yield "Of the run so far, with each step", RUN_FIGURES
    yield "Of each evaluation", EVALUATION_FIGURES
