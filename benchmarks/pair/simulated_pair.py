"""A serving engine and a rollout engine on one device in virtual time, and between them whoever decides for a guard.

The serving engine prefills in chunks, one request after the other, and all others decode in the same steps. While steps
of both engines overlap they share the device: each goes on at half of the speed that the two have together.
"""

import random
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Final

from msgspec import Struct

from ebbtide.demo.coserving.coserving_traffic import TrafficRequest
from ebbtide.scheduling.coserving.budget_decider import BudgetDecider

#: From a budget's being written to the first step of an engine that waits for one.
_WAKE_S: Final = 0.0005
_CHUNK_TOKENS: Final = 2048
#: Less of a step than this is left by rounding alone.
_NOTHING_S: Final = 1e-9


class Engines(Struct, frozen=True, kw_only=True):
    """What work takes, seconds. `rollouts`: in a rollout step; `together`: what both engines get of the device while
    steps of both overlap (1: they share it; 2: neither feels the other); `noise`: of durations, the logarithm's
    deviation; `hiccup`: one step in so many takes four times as long."""

    prefill_s: float = 0.01
    prefill_token_s: float = 0.0002
    decode_s: float = 0.009
    decode_each_s: float = 0.0002
    step_s: float = 0.004
    step_token_s: float = 0.000125
    rollouts: int = 32
    together: float = 1.0
    noise: float = 0.05
    hiccup: int = 2000


class Served(Struct):
    asked: TrafficRequest
    left: int  # of the prompt, to be prefilled
    first: float = 0.0
    last: float = 0.0
    made: int = 0


class Pair:
    """Both engines and the guard between them. Invariant: `_serving` and `_rolling` are the seconds of device time that
    the steps under way still need; None where none is."""

    def __init__(self, decides: BudgetDecider, engines: Engines, asked: Sequence[TrafficRequest], seed: int) -> None:
        self._decides, self._engines = decides, engines
        self._asked = deque(asked)
        self._chance = random.Random(seed)
        self.now = 0.0
        self._prefill: deque[Served] = deque()
        self._decoding: list[Served] = []
        self._held: deque[tuple[float, Served]] = deque()
        self._serving: float | None = None
        self._chunks: list[tuple[Served, int]] = []
        self._rolling: float | None = None
        self._tokens = 0
        self._began = 0.0
        self._decision = decides.decide(0.0)
        self._may_begin = 0.0
        self.done: list[Served] = []
        self.harvested = 0
        self.busy_s = 0.0
        self.reclaims: list[float] = []  # from an arrival to the end of the step that it found under way
        self._arrived = -inf

    def run(self) -> None:
        while self._asked or self._prefill or self._decoding or self._held:
            self._advance(self._next())
            self._events()
            self._begin()

    def _rates(self) -> tuple[float, float]:
        half = self._engines.together / 2
        return (half, half) if self._serving is not None and self._rolling is not None else (1.0, 1.0)

    def _next(self) -> float:
        serving, rolling = self._rates()
        times = [
            self._asked[0].at if self._asked else inf,
            self._held[0][0] if self._held else inf,
            self.now + self._serving / serving if self._serving is not None else inf,
            self.now + self._rolling / rolling if self._rolling is not None else inf,
            self._decision.review_at,
            self._may_begin if self._may_begin > self.now else inf,
        ]
        return max(self.now, min(times))

    def _advance(self, until: float) -> None:
        passed = until - self.now
        serving, rolling = self._rates()
        if self._serving is not None:
            self._serving -= passed * serving
        if self._rolling is not None:
            self._rolling -= passed * rolling
        if self._prefill or self._decoding or self._held:
            self.busy_s += passed
        self.now = until

    def _events(self) -> None:
        now, changed = self.now, self._decision.review_at <= self.now
        if self._rolling is not None and self._rolling <= _NOTHING_S:
            self._rolling = None
            self.harvested += self._tokens
            self._decides.stepped(now, self._tokens, now - self._began)
            if self._began <= self._arrived:
                self.reclaims.append(now - self._arrived)
            changed = True
        while self._asked and self._asked[0].at <= now:
            self._arrive(Served(self._asked[0], self._asked.popleft().prompt))
            changed = True
        while self._held and self._held[0][0] <= now:
            self._prefill.append(self._held.popleft()[1])
        if self._serving is not None and self._serving <= _NOTHING_S:
            self._serving = None
            self._step_done()
        if changed:
            self._decide()

    def _arrive(self, served: Served) -> None:
        name, now = _name(served), self.now
        self._decides.arrived(now, name, served.asked.prompt)
        self._arrived = now
        hold = self._decides.hold_s(now, self._began if self._rolling is not None else None)
        if hold > 0.0:
            self._held.append((now + hold, served))
        else:
            self._prefill.append(served)

    def _step_done(self) -> None:
        produced = list(self._decoding)
        for served, tokens in self._chunks:
            served.left -= tokens
            if not served.left:
                self._prefill.popleft()
                produced.append(served)
                self._decoding.append(served)
        for served in produced:
            served.made += 1
            served.last = self.now
            served.first = served.first or self.now
            self._decides.produced(self.now, _name(served), 1)
            if served.made >= served.asked.output:
                self._decides.ended(self.now, _name(served), ok=True)
                self._decoding.remove(served)
                self.done.append(served)
            self._decide()

    def _decide(self) -> None:
        before, self._decision = self._decision.budget, self._decides.decide(self.now)
        if not before.tokens or before.until < self.now:
            self._may_begin = self.now + _WAKE_S

    def _begin(self) -> None:
        engines, now = self._engines, self.now
        if self._serving is None and (self._prefill or self._decoding):
            self._serving = self._serve() * self._noise()
        budget = self._decision.budget
        if self._rolling is None and budget.tokens and self._may_begin <= now < budget.until:
            self._tokens, self._began = min(engines.rollouts, budget.tokens), now
            self._rolling = (engines.step_s + engines.step_token_s * self._tokens) * self._noise()

    def _serve(self) -> float:
        """The next serving step's chunks of prompts, and what it takes."""
        engines, room, cost = self._engines, _CHUNK_TOKENS, 0.0
        self._chunks = []
        for served in self._prefill:
            if room <= 0:
                break
            tokens = min(room, served.left)
            room -= tokens
            cost += engines.prefill_s * (served.left == served.asked.prompt) + engines.prefill_token_s * tokens
            self._chunks.append((served, tokens))
        if self._decoding:
            cost += engines.decode_s + engines.decode_each_s * len(self._decoding)
        return cost

    def _noise(self) -> float:
        hiccup = 4.0 if self._engines.hiccup and self._chance.random() * self._engines.hiccup < 1.0 else 1.0
        return hiccup * self._chance.lognormvariate(0.0, self._engines.noise)


def _name(served: Served) -> str:
    return str(id(served))
