"""Turns the rollouts of a record into the work of a simulated run."""

from collections import defaultdict
from itertools import pairwise

from ebbtide.simulator.recording.recorded_run import RecordedRun, RolloutColumns
from ebbtide.simulator.scenario.inputs.known_turns import KnownTurn, KnownTurns


def known_turns(recorded: RecordedRun) -> KnownTurns:
    """Returns the turns of each sample of each recorded step.

    Between two turns passes what passed then, from the end of a response to the next turn's placement. So the wait for
    a worker is in it. Prompts of unknown length have one token. A response has at least one.
    """
    rows = recorded.rollouts
    steps: dict[int, dict[int, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row, (step, group, episode) in enumerate(zip(rows.step, rows.group, rows.episode, strict=True)):
        steps[step][group][episode].append(row)
    return KnownTurns(
        steps=tuple(
            tuple(tuple(_turns(rows, found) for found in episodes.values()) for episodes in groups.values())
            for _, groups in sorted(steps.items())
        )
    )


def _turns(rows: RolloutColumns, found: list[int]) -> tuple[KnownTurn, ...]:
    ordered = sorted(found, key=lambda row: rows.turn[row])
    waits = [max(0.0, rows.begin_s[after] - rows.end_s[before]) for before, after in pairwise(ordered)]
    return tuple(
        KnownTurn(max(1, rows.prompt[row]), max(1, rows.length[row]), wait_s)
        for row, wait_s in zip(ordered, [*waits, 0.0], strict=True)
    )
