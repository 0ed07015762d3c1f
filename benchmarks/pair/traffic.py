"""At which speed a trace's arrivals load an engine as much as wanted."""

import math
from collections.abc import Sequence

from msgspec import Struct

from ebbtide.demo.coserving.request_traffic import TrafficRequest, faster

#: The speed at which a load is met is looked for between these, by halving.
_SLOWEST, _FASTEST, _HALVINGS = 1e-3, 1e3, 40


class Speeds(Struct, frozen=True, kw_only=True):
    """Of a serving engine alone: a prompt takes `fixed_s` and `prompt_s` a token, a further token `token_s`, and
    `more_s` longer for each other request that decodes at the same time."""

    fixed_s: float
    prompt_s: float
    token_s: float
    more_s: float = 0.0

    def prefill(self, tokens: int) -> float:
        return self.fixed_s + self.prompt_s * tokens


def busy_s(requests: Sequence[TrafficRequest], speeds: Speeds) -> float:
    """Seconds with a request inside: prompts are read one after the other, tokens are made for all at once."""
    free = until = total = 0.0
    for one in requests:
        free = max(free, one.at) + speeds.prefill(one.prompt)
        end = free + one.output * speeds.token_s
        total += max(0.0, end - max(until, one.at))
        until = max(until, end)
    return total


def speed_for(requests: Sequence[TrafficRequest], load: float, speeds: Speeds) -> float:
    """How many times as fast `requests` must come for the engine to be busy for `load` of the time."""
    slow, fast = _SLOWEST, _FASTEST
    for _ in range(_HALVINGS):
        middle = math.sqrt(slow * fast)
        at = faster(requests, middle)
        busy = busy_s(at, speeds)
        span = max(at[-1].at, busy)
        slow, fast = (middle, fast) if busy / span < load else (slow, middle)
    return math.sqrt(slow * fast)


def lasting(requests: Sequence[TrafficRequest], load: float, speeds: Speeds, seconds: float) -> list[TrafficRequest]:
    """The first of `requests`, as many as at that load last for `seconds`, at the speed at which they do."""
    few, many = 2, len(requests)
    while few < many:
        middle = (few + many + 1) // 2
        chosen = requests[:middle]
        if chosen[-1].at / speed_for(chosen, load, speeds) <= seconds:
            few = middle
        else:
            many = middle - 1
    chosen = requests[:few]
    return faster(chosen, speed_for(chosen, load, speeds))
