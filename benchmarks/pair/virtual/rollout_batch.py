"""Models the rollouts of a borrowed engine: what each step computes, and who gives up its keys and values.

Rollouts never run out: another one takes the place of each that ends. Steps are filled as `BudgetedScheduler` of the
rollout worker fills them, and victims are chosen by the same decision, `choose_victims`.

Invariant: running and waiting rollouts together are `slots`.
"""

from collections import deque
from random import Random
from typing import Final

from msgspec import Struct

from benchmarks.pair.virtual.pair_costs import PairCosts
from ebbtide.rollout_worker.engine.kv_victims import HeldRequest, choose_victims

#: A limit that is never reached.
UNLIMITED: Final = 1 << 60


class RolloutShape(Struct, frozen=True, kw_only=True):
    """Tokens of prompts and responses. Responses are drawn evenly in their logarithm, so they are long-tailed."""

    prompt: int = 64
    shortest: int = 512
    longest: int = 1920


class _Rollout(Struct, eq=False):
    name: str
    prompt: int
    context: int  # tokens of prompt and response so far
    end: int  # tokens of prompt and whole response
    computed: int = 0  # tokens whose keys and values are there
    turn: int = 0  # its last step


class RolloutBatch:
    """`made`: tokens of responses; `reread`: tokens whose keys and values were given up; `wasted`: tokens of rollouts
    that were aborted."""

    def __init__(self, costs: PairCosts, shape: RolloutShape, random: Random) -> None:
        self._slots, self._step_tokens = costs.slots, costs.step_tokens
        self._block = costs.memory.block_tokens
        self._shape, self._random = shape, random
        self._running: list[_Rollout] = []
        self._waiting: deque[_Rollout] = deque()
        self._plan: list[tuple[_Rollout, int]] = []
        self._limit = UNLIMITED
        self._steps = self._drawn = 0
        self.made = self.reread = self.wasted = 0
        self._refill()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def blocks(self) -> int:
        """Blocks of keys and values that are in use."""
        return sum(self._in_blocks(one.computed) for one in self._running)

    def begin(self, tokens: int, sequences: int) -> int:
        """Begin a step of at most so many tokens and sequences. Returns its tokens; 0: nothing fits."""
        self._make_room()
        self._plan, left = [], tokens
        for one in sorted(self._running, key=lambda one: one.turn)[:sequences]:
            if left <= 0:
                break
            count = min(one.context - one.computed, left)
            self._plan.append((one, count))
            left -= count
        self._admit(left, sequences)
        return sum(count for _, count in self._plan)

    def end(self) -> int:
        """End the step. Returns the tokens that it made."""
        made = 0
        self._steps += 1
        for one, count in self._plan:
            one.computed += count
            one.turn = self._steps
            if one.computed == one.context:
                one.context += 1
                made += 1
        self._leave()
        self.made += made
        return made

    def fit(self, blocks: int) -> None:
        """Use at most so many blocks from now on. Victims wait, and are read again."""
        if blocks == self._limit:
            return
        self._limit = blocks
        while self._running and (lack := self.blocks - blocks) > 0:
            self._preempt(lack)

    def abort(self, blocks: int) -> None:
        """Abort whole rollouts, those with fewest tokens first, until the others use no more than so many blocks."""
        excess = self.blocks - blocks
        for one in sorted(self._running, key=lambda one: (one.context, one.name)):
            if excess <= 0:
                break
            excess -= self._in_blocks(one.computed)
            self.wasted += one.context - one.prompt
            self._running.remove(one)
        self._refill()

    def lose_cache(self) -> None:
        """All keys and values are gone."""
        for one in list(self._running):
            self._wait(one)

    def _admit(self, left: int, sequences: int) -> None:
        """Take waiting rollouts in; those that the limit could never hold wait without blocking others."""
        parked: list[_Rollout] = []
        while self._waiting and left > 0 and len(self._running) < self._slots and len(self._plan) < sequences:
            one = self._waiting.popleft()
            if min(one.context + self._block, one.end) > self._limit * self._block:
                parked.append(one)
                continue
            count = min(one.context - one.computed, left)
            # Running rollouts may grow by a block each before another one enters, which would be preempted at once.
            watermark = len(self._running) if self._limit < UNLIMITED else 0
            # vLLM admits a request once its whole context fits, though it reads it in chunks.
            if self._in_blocks(one.context) > self._limit - self._reserved() - watermark:
                self._waiting.appendleft(one)
                break
            self._running.append(one)
            self._plan.append((one, count))
            left -= count
        self._waiting.extendleft(reversed(parked))

    def _make_room(self) -> None:
        """Preempt until all running rollouts can get the blocks for their next tokens."""
        while self._running and (lack := self._reserved() - self._limit) > 0:
            self._preempt(lack, growing=True)

    def _reserved(self) -> int:
        """Blocks that running rollouts use after their next step, at most."""
        return sum(self._in_blocks(self._after(one)) for one in self._running)

    def _after(self, one: _Rollout) -> int:
        return min(one.context, one.computed + self._step_tokens)

    def _preempt(self, lack: int, *, growing: bool = False) -> None:
        held = [
            HeldRequest(
                request=one.name,
                computed=one.computed,
                blocks=self._in_blocks(self._after(one) if growing else one.computed),
                remaining=max(1, one.end - one.context),
            )
            for one in self._running
        ]
        names = set(choose_victims(held, lack)) or {min(held, key=lambda one: one.computed).request}
        for one in [one for one in self._running if one.name in names]:
            self._wait(one)

    def _wait(self, one: _Rollout) -> None:
        self._running.remove(one)
        self.reread += one.computed
        one.computed = 0
        self._waiting.appendleft(one)

    def _leave(self) -> None:
        """Replace the rollouts that have ended."""
        if any(one.context >= one.end for one in self._running):
            self._running = [one for one in self._running if one.context < one.end]
            self._refill()

    def _refill(self) -> None:
        shape = self._shape
        while len(self._running) + len(self._waiting) < self._slots:
            self._drawn += 1
            length = round(shape.shortest * (shape.longest / shape.shortest) ** self._random.random())
            one = _Rollout(str(self._drawn), shape.prompt, shape.prompt, shape.prompt + max(1, length))
            self._waiting.append(one)

    def _in_blocks(self, tokens: int) -> int:
        return -(-tokens // self._block)
