"""An engine that shares its speed among what it runs: no event per token, per flush or per tick.

All that run make tokens at the same rate, so one number, the tokens that each has made since the engine began
(`_made`), stands for all: a rollout ends when it reaches a mark that is known when it starts.

Invariant: `_made` is right at `_at`; `running` maps a rollout to `_made` at its start, and what it had then.
"""

from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from benchmarks.replay.setting import Setting


class Rollout:
    """One of a step. `made`: tokens stored, current while nobody runs it; `ready`: when its prefill ends."""

    __slots__ = ("attempts", "given", "length", "made", "number", "ready", "twice")

    def __init__(self, number: int, length: int) -> None:
        self.number, self.length = number, length
        self.made = self.twice = self.given = self.ready = 0.0
        self.attempts = 0


class _Share(NamedTuple):
    mark: float
    had: float
    since: float
    entry: int


class Span(NamedTuple):
    """What an engine did while nothing began or ended in it."""

    running: int
    context: float
    tokens: float
    seconds: float


class Engine:
    def __init__(self, setting: Setting, now: float, speed: float = 1.0) -> None:
        self._setting = setting
        self._rate = setting.rate * speed
        self._made = self._contexts = 0.0
        self._at = now
        self.ready = now  # until then prefills hold it up
        self._ends: list[tuple[float, int, Rollout]] = []
        self._entries = 0
        self.running: dict[Rollout, _Share] = {}
        self.queue: deque[Rollout] = deque()

    def __len__(self) -> int:
        return len(self.running) + len(self.queue)

    def pending(self, now: float) -> int:
        """How many have not started: those in the queue, and those that are being prefilled."""
        prefilled = sum(rollout.ready > now for rollout in self.running) if now < self.ready else 0
        return len(self.queue) + prefilled

    def started(self, rollout: Rollout, now: float) -> bool:
        return rollout in self.running and rollout.ready <= now

    def rate(self) -> float:
        """Tokens/s that each of those running makes."""
        running = len(self.running)
        cost = 1.0
        if self._setting.context_tokens:
            cost += self.context() / self._setting.context_tokens
        return self._rate * min(1.0, self._setting.plateau / cost / running) if running else 0.0

    def context(self) -> float:
        """Mean tokens of prompt and response of those running."""
        running = len(self.running)
        return self._contexts / running + self._made if running else 0.0

    def advance(self, now: float) -> Span:
        """Generate until `now`."""
        seconds = max(0.0, now - max(self._at, self.ready))
        rate, context = self.rate(), self.context()
        self._made += rate * seconds
        self._at = now
        return Span(len(self.running), context, rate * seconds * len(self.running), seconds)

    def give(self, rollout: Rollout, now: float, *, prefill: bool) -> None:
        """Advanced to `now`: take a rollout, to run it at once if a slot is free."""
        if prefill:
            tokens = self._setting.prompt_tokens + rollout.made
            self.ready = max(now, self.ready) + tokens / self._setting.prefill_tokens_per_s
        self.queue.append(rollout)
        rollout.given, rollout.ready = now, max(now, self.ready)
        self._start(now)

    def made(self, rollout: Rollout) -> float:
        share = self.running.get(rollout)
        return rollout.made if share is None else share.had + self._made - share.mark

    def finished(self, now: float) -> list[Rollout]:
        """Advanced to `now`: those that have ended; the queue moves up."""
        ended = []
        while (rollout := self._first()) is not None and self._ends[0][0] <= self._made + 1e-6:
            self._stop(rollout)
            rollout.made = float(rollout.length)
            ended.append(rollout)
        self._start(now)
        return ended

    def release(self, rollout: Rollout, now: float) -> None:
        """Advanced to `now`: hand a rollout back with all its tokens."""
        if rollout in self.running:
            rollout.made = self.made(rollout)
            self._stop(rollout)
        else:
            self.queue.remove(rollout)
        self._start(now)

    def lose(self, now: float) -> list[Rollout]:
        """Advanced to `now`: the machine is gone, and with it what each rollout had made since its last flush."""
        setting, rate = self._setting, self.rate()
        lost = [*self.running, *self.queue]
        for rollout, share in self.running.items():
            made = self._made - share.mark
            window = min(made, float(setting.flush_tokens), rate * ((now - share.since) % setting.flush_s))
            rollout.twice += window
            rollout.made = share.had + made - window
        self.running.clear()
        self.queue.clear()
        self._ends.clear()
        return lost

    def next_end(self) -> float:
        """When the next rollout will end if nothing changes; inf while none runs."""
        if self._first() is None:
            return inf
        return max(self._at, self.ready) + max(0.0, self._ends[0][0] - self._made) / self.rate()

    def _first(self) -> Rollout | None:
        """Who ends first; entries of those that have gone are dropped."""
        while self._ends:
            _, entry, rollout = self._ends[0]
            share = self.running.get(rollout)
            if share is not None and share.entry == entry:
                return rollout
            heappop(self._ends)
        return None

    def _start(self, now: float) -> None:
        while self.queue and len(self.running) < self._setting.slots:
            rollout = self.queue.popleft()
            self._entries += 1
            self.running[rollout] = _Share(self._made, rollout.made, now, self._entries)
            self._contexts += self._setting.prompt_tokens + rollout.made - self._made
            heappush(self._ends, (self._made + rollout.length - rollout.made, self._entries, rollout))

    def _stop(self, rollout: Rollout) -> None:
        share = self.running.pop(rollout)
        self._contexts -= self._setting.prompt_tokens + share.had - share.mark
