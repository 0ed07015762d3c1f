"""When steps of a replay would end for one who knows every length, and who at every moment moves rollouts for nothing,
loses no token, and fills a free slot in no time.

The rollouts with most tokens left run at full rate, and equals take turns: the level algorithm of Muntz and Coffman
(1970), which ends a step soonest on machines that are alike. No policy reaches it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

from benchmarks.replay.setting import BALANCE, Setting
from benchmarks.replay.trace_scenario import ReplayCase, trace_scenario
from ebbtide.simulator.scenario.workload import Workload


def ends(
    steps: Sequence[Sequence[int]], fleet: Sequence[tuple[float, int]], until: float, setting: Setting
) -> list[float]:
    """When each step ends, up to `until`. `fleet`: how many workers serve from when on, in order of time."""
    times = [at for at, _ in fleet]
    per_worker = min(setting.slots, setting.plateau)
    now = 0.0
    found: list[float] = []
    for lengths in steps:
        left = sorted(map(float, lengths), reverse=True)
        while left:
            at = bisect_right(times, now)
            most = fleet[at - 1][1] * per_worker if at else 0
            change = times[at] if at < len(times) else inf
            if not most and change == inf:
                return found
            rest_s = max(left[0], sum(left) / most) / setting.rate if most else inf
            if now + rest_s <= change:
                now, left = now + rest_s, []
            else:
                left = levelled(left, setting.rate * (change - now), most)
                now = change
        if now > until:
            return found
        found.append(now)
        now += setting.gap_s
    return found


def levelled(left: list[float], each: float, most: int) -> list[float]:
    """Tokens left, falling, after time in which a rollout can make `each` tokens, and `most` of them can run at once.

    All that exceeds a level is cut down to it, by `each` at most; the level is as low as `most` allow.
    """
    allowed, low, high = each * most, 0.0, left[0]
    for _ in range(60):
        level = 0.5 * (low + high)
        done = sum(min(each, one - level) for one in left if one > level)
        low, high = (level, high) if done > allowed else (low, level)
    return [rest for one in left if (rest := max(one - each, min(one, high))) > 1e-6]


def drawn_steps(case: ReplayCase) -> list[list[int]]:
    """Response lengths of as many steps as could possibly end in the case's time, as the simulator draws them."""
    setting, scenario = case.setting, trace_scenario(case, BALANCE)
    work, run = Workload(scenario, setting.seed), scenario.run[0].name
    steps: list[list[int]] = []
    soonest = 0.0
    while soonest <= case.until_s:
        number = len(steps)
        steps.append([work.turns(run, number, prompt, 0)[0].response for prompt in range(setting.rollouts)])
        soonest += max(1.0, max(steps[-1]) / setting.rate)
    return steps
