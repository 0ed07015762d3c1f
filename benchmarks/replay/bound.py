"""What the same fleet could do for one who moves rollouts for nothing, loses no token, notices a loss and fills a free
slot in no time, at every moment anew. Neither of the two knows what will become of the fleet.

`ends`, the bound, knows every length as well. At every moment the rollouts with most tokens left run at full rate, and
equals take turns (the level algorithm of Muntz and Coffman, 1970, which ends a step soonest on machines that are
alike). No policy reaches it, nor does the oracle (`setting.ORACLE`), which keeps to the engines and their slots.

`blind_ends` knows no length: all that have not ended run alike. It says what not knowing costs. Where lengths are drawn
independently, with a heavy tail, and several of a step are long, one who does not know them can hardly do better: any
rollout may be a long one, and the step ends with the one that was put off most. (With a single long one, luck can.)
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf

from benchmarks.replay.setting import Setting


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


def blind_ends(
    steps: Sequence[Sequence[int]], fleet: Sequence[tuple[float, int]], until: float, setting: Setting
) -> list[float]:
    """As `ends`, of a schedule in which all rollouts that have not ended share all the speed there is."""
    times = [at for at, _ in fleet]
    now = 0.0
    found: list[float] = []
    for lengths in steps:
        rising, ended, made = sorted(lengths), 0, 0.0
        while ended < len(rising):
            at = bisect_right(times, now)
            most = fleet[at - 1][1] * min(setting.slots, setting.plateau) if at else 0
            change = times[at] if at < len(times) else inf
            rate = setting.rate * min(1.0, most / (len(rising) - ended))
            end = now + (rising[ended] - made) / rate if rate else inf
            if end == change == inf:
                return found
            if end <= change:
                now, made, ended = end, float(rising[ended]), ended + 1
            else:
                now, made = change, made + rate * (change - now)
        if now > until:
            return found
        found.append(now)
        now += setting.gap_s
    return found
