"""The simulated engine does what a plain loop over all steps and blocks does, to the last bit."""

from random import Random

import pytest
from msgspec.structs import replace

from ebbtide.simulator.engines.engine_profile import EngineDelays, StepCosts
from ebbtide.simulator.engines.simulated_engine import SimulatedEngine
from tests.unit.simulator.made_up_profiles import engine_profile
from tests.unit.simulator.stepwise_engine import StepwiseEngine, Tokens

#: Sums of multiples of this are exact, so both engines must agree to the last bit.
TICK = 2.0**-20


class Workload:
    """Does the same random things to both engines, and compares all that they tell after each."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = Random(f"{seed} workload")
        costs = StepCosts(
            base_s=draw.randrange(1, 4096) * TICK,
            weights_s=draw.randrange(4096) * TICK,
            token_s=draw.randrange(512) * TICK,
            sequence_s=draw.randrange(64) * TICK,
            context_s=draw.randrange(16) * TICK,
            pair_s=draw.randrange(4) * TICK,
            prompt_s=draw.choice([0, draw.randrange(4096)]) * TICK,
        )
        self.block = draw.choice([1, 4, 16])
        tokens = draw.choice([160, 400, 4000])
        self.most = tokens // 2
        slots = draw.choice([1, 4, 12])
        self.profile = engine_profile(
            costs=costs,
            tokens=tokens,
            block=self.block,
            batched=draw.choice([12, 40, 500]),
            prefix_cache=draw.random() < 0.8,
            whole_prompt_fits=draw.random() < 0.7,
        )
        delays = EngineDelays(admit_s=draw.choice([0, draw.randrange(50_000)]) * TICK)
        self.profile = replace(self.profile, delays=delays)
        self.now = draw.randrange(100) * TICK
        speed = draw.choice([0.5, 1.0, 2.0])
        self.fast = SimulatedEngine(self.profile, slots=slots, now=self.now, speed=speed)
        self.slow = StepwiseEngine(self.profile, slots=slots, now=self.now, speed=speed)
        self.here: dict[str, tuple[str, tuple[str, ...], Tokens, int]] = {}  # prefix, after, prompt, length
        self.ended: list[tuple[tuple[str, ...], Tokens]] = []  # a turn and those before it, the last one first
        self.left: dict[str, tuple[str, tuple[str, ...], Tokens, int, int]] = {}
        self.number = 0
        self.events = 0

    def run(self, rounds: int) -> None:
        ways = [self.admit, self.admit, self.admit, self.remove, self.hold, self.go_on, self.come_back]
        for _ in range(rounds):
            self.now += self.draw.choice([0, 1, 50, 5000, 50_000, 500_000]) * self.draw.randrange(3) * TICK
            chance = self.draw.random()
            if chance < 0.02:
                self.clear()
            elif chance < 0.05:
                self.advance()
                self.fast.new_weights(self.now)
                self.slow.new_weights(self.now)
            elif chance < 0.6:
                self.draw.choice(ways)()
            self.advance()
        self.go_on()
        self.now += 1e4
        self.advance()
        assert not self.here

    def advance(self) -> None:
        events = [(one.at, one.kind.value, one.key) for one in self.fast.advance(self.now)]
        assert events == self.slow.advance(self.now)
        self.events += len(events)
        for _, kind, key in events:
            if kind == "finished":
                prefix, after, prompt, length = self.here.pop(key)
                if not prefix:  # a turn that reads a part of its group's prompt again shares it in one of them alone
                    self.ended.append(((key, *after), (*prompt, *((key, place) for place in range(length)))))
        assert [self.fast.made(key) for key in self.here] == [self.slow.made(key) for key in self.here]
        assert (self.fast.running, self.fast.waiting) == (len(self.slow.run), len(self.slow.line))
        assert (self.fast.generated, self.fast.read, self.fast.reread, self.fast.preemptions) == (
            self.slow.generated, self.slow.read, self.slow.reread, self.slow.preemptions,
        )  # fmt: skip
        assert self.fast.kv_tokens == self.slow.kv_tokens or self.fast.running
        assert self.fast.busy_s == self.slow.busy
        assert self.fast.next_event() >= self.now

    def admit(self) -> None:
        self.number += 1
        key, draw, prefix, after = f"r{self.number}", self.draw, "", tuple[str, ...]()
        if self.ended and draw.random() < 0.3:  # the next turn
            after, begin = self.ended.pop(draw.randrange(len(self.ended)))
            if draw.random() < 0.3:  # another engine had a turn in between
                after = (f"{key} elsewhere", *after)
                begin = (*begin, *((after[0], place) for place in range(draw.randrange(1, 30))))
            prompt: Tokens = (*begin, *((key, "more", place) for place in range(draw.randrange(1, 30))))
        elif self.block > 1 and draw.random() < 0.6:  # one of a group
            prefix = f"g{self.number // 4}"
            size = Random(prefix).randrange(1, 80)
            prompt = tuple((prefix, place) for place in range(size))
        else:
            prompt = tuple((key, "alone", place) for place in range(draw.randrange(1, 120)))
        length = draw.randrange(1, 60)
        if len(prompt) + length <= self.most:
            made = draw.randrange(length) if draw.random() < 0.3 else 0
            self.give(key, prefix, after, prompt, made, length, cached=draw.choice([0, 0, 0, len(prompt) // 2]))

    def give(
        self, key: str, prefix: str, after: tuple[str, ...], prompt: Tokens, made: int, length: int, cached: int = 0
    ) -> None:
        self.here[key] = (prefix, after, prompt, length)
        self.fast.admit(
            key, prompt=len(prompt), made=made, length=length, now=self.now, prefix=prefix, after=after, cached=cached
        )
        self.slow.admit(key, prompt, made, length, self.now, cached=cached)

    def remove(self) -> None:
        self.advance()
        if self.here:
            key = self.draw.choice(list(self.here))
            prefix, after, prompt, length = self.here.pop(key)
            made = self.fast.remove(key, self.now)
            assert made == self.slow.remove(key, self.now)
            self.left[key] = (prefix, after, prompt, made, length)

    def come_back(self) -> None:
        self.advance()
        for key, (prefix, after, prompt, made, length) in list(self.left.items()):
            del self.left[key]
            if (len(prompt) + made) % self.block:  # else its last block is in the cache, and is made again beside it
                self.give(key, prefix, after, prompt, made, length)

    def hold(self) -> None:
        self.fast.hold(self.now)
        self.slow.hold(self.now)

    def go_on(self) -> None:
        self.fast.go_on(self.now)
        self.slow.go_on(self.now)

    def clear(self) -> None:
        self.advance()
        assert self.fast.clear(self.now) == self.slow.clear(self.now)
        self.here.clear()


@pytest.mark.parametrize("seed", range(30))
def test_it_does_what_a_loop_over_all_steps_and_blocks_does(seed: int) -> None:
    work = Workload(seed)
    work.run(100)
    assert work.events
