"""Records what a borrowed worker gets of a served device under our guard, as a tape for scenarios: `t_s,share`.

    python -m benchmarks.pair.virtual.grant_tape TRACE [--load FACTOR] > grants.csv

A pair plays the trace twice in virtual time. In the first lap the guard learns, the second one is recorded. Spells are
seconds long, so that a fleet of such hosts needs few events. A standstill that is shorter than `LEAST_S` is no spell of
its own: it lowers the share of the spell around it.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks import arguments
from benchmarks.pair.virtual.pair_costs import PairCosts
from benchmarks.pair.virtual.serving_policies import OURS, UNGUARDED, played_alone, resolved_targets
from ebbtide.coordinator.rules.move_costs import SHORT_S
from ebbtide.demo.coserving.request_traffic import TraceLengths, TrafficRequest, faster, laps, read_trace
from ebbtide.serving_guard.governor.budget_decider import LatencyTargets

#: The coordinator moves nothing for a shorter reclaim, so a shorter standstill decides nothing.
LEAST_S: Final = SHORT_S
#: A spell in which the worker steps is at most this long: longer than most bursts, shorter than a rollout.
SPELL_S: Final = 10.0
#: Scenarios take no lower share of a worker that steps.
LEAST_SHARE: Final = 0.01
#: The speed without users is measured for so long.
_ALONE_S: Final = 30.0


def grant_tape(
    requests: Sequence[TrafficRequest], seconds: float, costs: PairCosts, slo: LatencyTargets, *, seed: int = 0
) -> list[tuple[float, float]]:
    """Each spell's begin and the share of the rollouts' own speed in it, for requests that fill so many seconds.

    The last row is the tape's end.
    """
    targets = resolved_targets(slo, played_alone(requests, costs, seed=seed).done)
    resting = UNGUARDED.play([], costs, targets, seed=seed)
    resting.rest(_ALONE_S)
    rate = max(1, resting.harvested) / _ALONE_S
    pair = OURS.play(laps(requests, seconds, 2), costs, targets, seed=seed)
    steps: list[tuple[float, float, int]] = []
    pair.stepped = lambda began, now, made: steps.append((began - seconds, now - seconds, made))
    pair.run(2 * seconds)
    pair.rest(2 * seconds)
    counted = [one for one in steps if one[0] >= 0.0]
    shares = [(begin, min(1.0, made / (rate * (end - begin)))) for begin, end, made in _spells(counted, seconds)]
    return [*((begin, share if share >= LEAST_SHARE else 0.0) for begin, share in shares), (seconds, 0.0)]


def _spells(steps: Sequence[tuple[float, float, int]], end_s: float) -> Iterator[tuple[float, float, int]]:
    """(begin, end, tokens) of each spell."""
    begin = last = 0.0
    tokens = 0
    for began, ended, made in [*steps, (end_s, end_s, 0)]:
        stood = began - last >= LEAST_S
        if last > begin and (stood or last - begin >= SPELL_S):
            yield begin, last, tokens
            begin, tokens = last, 0
        if stood:
            yield begin, began, 0
            begin = began
        tokens += made
        last = ended
    if last > begin:
        yield begin, last, tokens


def tape_text(tape: Sequence[tuple[float, float]]) -> str:
    return "t_s,share\n" + "".join(f"{at:.3f},{share:.3f}\n" for at, share in tape)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pair.virtual.grant_tape", description=__doc__)
    parser.add_argument("trace", type=Path, help="t_s,input_tokens,output_tokens")
    parser.add_argument("--load", type=arguments.factor, default=1.0, help="requests come so many times as fast")
    args = parser.parse_args(argv)
    whole = TraceLengths(prompts=1.0, outputs=1.0, longest_prompt=131_072, longest_output=32_768)
    requests = faster(read_trace(args.trace, (0.0, 1e8), whole), args.load)
    sys.stdout.write(tape_text(grant_tape(requests, requests[-1].at + 1.0, PairCosts(), LatencyTargets())))


if __name__ == "__main__":
    main()
