"""Plays rollouts on one engine whose memory is divided by chunks: each that runs makes a token in each step."""

from collections.abc import Callable
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from ebbtide.rollout_worker.generation.chunk_admission import ChunkRules, KvContext, divide_memory

#: The longest response, tokens.
MOST = 1500


class Played(Struct):
    """A rollout, and the tokens that it will really make."""

    context: KvContext
    left: int

    def step(self) -> None:
        context = self.context
        rest = None if context.rest is None else context.rest - 1
        self.context = replace(context, tokens=context.tokens + 1, most=context.most - 1, rest=rest)
        self.left -= 1


def drawn(seed: int, count: int, *, known: bool) -> list[Played]:
    """Groups of four with heavy-tailed lengths. `known`: with true forecasts, else with none."""
    draw, made = Random(seed), list[Played]()
    for number in range(count):
        length = int(min(MOST, max(5, draw.lognormvariate(5, 1))))
        rest = float(length) if known else None
        context = KvContext(
            key=f"r{number}", prompt=100, tokens=100, most=MOST, since_s=0.0, prefix=f"g{number // 4}", rest=rest
        )
        made.append(Played(context, length))
    return made


class PlayedMemory:
    """One engine. `look` is called after each decision with those that run."""

    def __init__(self, rules: ChunkRules, todo: list[Played], look: Callable[[list[KvContext]], None]) -> None:
        self.rules, self._look = rules, look
        self.waiting = {one.context.key: one for one in todo}
        self.running = dict[str, Played]()
        self.steps = self.parked = 0
        self.order: list[str] = []  # of starts

    def play(self) -> None:
        """Until all have ended."""
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        self.steps += 1
        for key, one in list(self.running.items()):
            one.step()
            assert one.context.tokens <= one.context.reserved
            if not one.left:
                del self.running[key]
        self._decide()
        self._look([one.context for one in self.running.values()])

    def _decide(self) -> None:
        running = [one.context for one in self.running.values()]
        waiting = [one.context for one in self.waiting.values()]
        decision = divide_memory(running, waiting, self.rules)
        for key in decision.parked:
            one = self.running.pop(key)
            one.context = replace(one.context, reserved=0)
            self.waiting = {key: one, **self.waiting}
            self.parked += 1
        for key, reserved in decision.grown:
            self.running[key].context = replace(self.running[key].context, reserved=reserved)
        for key, reserved in decision.started:
            one = self.running[key] = self.waiting.pop(key)
            one.context = replace(one.context, reserved=reserved)
            self.order.append(key)
