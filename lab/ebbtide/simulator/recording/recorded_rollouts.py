"""Gathers a run's finished rollouts from its attempts, step by step and group by group."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ebbtide.simulator.recording.recorded_run import LeftOut, RolloutColumns
from ebbtide.simulator.recording.recorded_steps import StepTimes
from ebbtide.types.run import AttemptSpan, BatchSpec


class _Rollout(NamedTuple):
    step: int
    group: str
    episode: str
    spans: list[AttemptSpan]  # in their order; the last one finished it

    @property
    def last(self) -> AttemptSpan:
        return self.spans[-1]


class GatheredRollouts(NamedTuple):
    columns: RolloutColumns
    generated_s: dict[int, float]  # step -> when its last rollout ended
    left_out: LeftOut


def gather_rollouts(
    spans: Iterable[AttemptSpan], times: StepTimes, batch: BatchSpec, *, ended: bool, trimmed: bool
) -> GatheredRollouts:
    """Gathers the training rollouts of whole steps.

    `ended`: the run is over, and so is its last step. `trimmed`: the store no longer has the oldest attempts. Rollouts
    that were submitted without a step belong to steps of `groups_per_step` groups, in the order of their begin.
    """
    by_rollout: dict[str, list[AttemptSpan]] = defaultdict(list)
    evaluation, first_end_s = set[str](), 0.0
    for span in spans:
        if not by_rollout and not evaluation:
            first_end_s = span.end_s
        if span.evaluation:
            evaluation.add(span.rollout_id)
        else:
            by_rollout[span.rollout_id].append(span)
    rollouts = _placed({name: sorted(found, key=_order) for name, found in by_rollout.items()}, batch)
    whole = {
        step
        for step in {one.step for one in rollouts}
        if (ended or times.over(step)) and not (trimmed and _cut(step, times, batch, first_end_s))
    }
    kept = [one for one in rollouts if one.step in whole and one.last.finished]
    unfinished = sum(not one.last.finished for one in rollouts)
    left_out = LeftOut(
        evaluation=len(evaluation), unfinished=unfinished, of_partial_steps=len(rollouts) - unfinished - len(kept)
    )
    generated_s: dict[int, float] = defaultdict(float)
    for one in kept:
        generated_s[one.step] = max(generated_s[one.step], one.last.end_s)
    return GatheredRollouts(_columns(kept), dict(generated_s), left_out)


def _order(span: AttemptSpan) -> tuple[float, int]:
    return span.begin_s, span.first


def _cut(step: int, times: StepTimes, batch: BatchSpec, first_end_s: float) -> bool:
    """Whether attempts of the step may have ended before the oldest one that is left."""
    opened_s = times.opened_s(step, batch.max_staleness)
    return opened_s is None or opened_s < first_end_s


def _placed(by_rollout: Mapping[str, Sequence[AttemptSpan]], batch: BatchSpec) -> list[_Rollout]:
    """Rollouts with their steps, ordered by step, group, episode and turn; groups and episodes by their begin."""
    groups: dict[str, list[_Rollout]] = defaultdict(list)
    for name, found in by_rollout.items():
        span = found[-1]
        group = span.group_id or name
        groups[group].append(_Rollout(-1 if span.step is None else span.step, group, span.episode_id or name, [*found]))
    placed, begun, samples = list[_Rollout](), 0, batch.groups_per_step * batch.group_size
    for group in sorted(groups, key=lambda group: (_begin(groups[group]), group)):
        members = groups[group]
        step = members[0].step
        if step < 0:
            step = begun // samples
            begun += batch.group_size if members[0].last.group_id else 1
        placed += [one._replace(step=step) for one in members]
    first = {name: index for index, name in enumerate(groups)}
    begins = {group: _begin(found) for group, found in groups.items()}
    return sorted(placed, key=lambda one: (one.step, begins[one.group], first[one.group], one.episode, one.last.turn))


def _begin(rollouts: Iterable[_Rollout]) -> float:
    return min(one.spans[0].begin_s for one in rollouts)


def _columns(rollouts: Sequence[_Rollout]) -> RolloutColumns:
    groups = _numbers(one.group for one in rollouts)
    episodes = _numbers(one.episode for one in rollouts)
    return RolloutColumns(
        step=[one.step for one in rollouts],
        group=[groups[one.group] for one in rollouts],
        episode=[episodes[one.episode] for one in rollouts],
        turn=[one.last.turn for one in rollouts],
        prompt=[one.last.prompt_tokens for one in rollouts],
        length=[one.last.last for one in rollouts],
        attempts=[len(one.spans) for one in rollouts],
        begin_s=[one.spans[0].begin_s for one in rollouts],
        end_s=[one.last.end_s for one in rollouts],
    )


def _numbers(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}
