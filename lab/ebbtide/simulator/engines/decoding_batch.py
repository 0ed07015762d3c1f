"""Models what an engine's steps compute: sequences, the batch that decodes, and runs of alike steps.

Steps are numbered from 1 on over the engine's life. A sequence's `base` and the number of a step add up to the tokens
that its response has after that step.

Invariant: the sums are those of the members. A member's entry in `_ends` has the step of its `ends`; other entries of
it are old, and are dropped when they come first.
"""

from heapq import heappop, heappush
from math import sqrt
from typing import Final

from ebbtide.simulator.engines.kv_prefixes import KvPrefix


class EngineSequence:
    """A prompt and its response, from admission on. Tokens, unless stated."""

    __slots__ = (
        "after",
        "again",
        "base",
        "cached",
        "decoding",
        "ends",
        "fed",
        "key",
        "length",
        "made",
        "order",
        "parent",
        "prefix",
        "prompt",
        "ready",
        "salt",
        "start",
        "started",
        "text",
    )

    def __init__(
        self,
        key: str,
        prompt: int,
        made: int,
        length: int,
        prefix: str,
        after: tuple[str, ...],
        cached: int,
        text: str,
        ready: float,
    ) -> None:
        self.key, self.prompt, self.length = key, prompt, length
        self.prefix, self.after, self.cached, self.text = prefix, after, cached, text  # see `SimulatedEngine.admit`
        self.ready = ready  # when a step may begin to read it, in the engine's own time
        self.made = made  # of the response when it last began to be read
        self.fed = 0  # read so far, those found in the cache included
        self.again = made > 0  # what it reads was read or made before, here or elsewhere
        self.started = False  # its first new token was reported
        self.decoding = False
        self.base = self.ends = 0  # see `DecodingBatch`
        self.order = 0  # of its start among all of the engine
        self.parent: KvPrefix | None = None  # whose blocks it shares
        self.start = 0  # blocks that it shares
        self.salt = 0  # of the weights that read it

    @property
    def known(self) -> int:
        """All that must be read before it decodes."""
        return self.prompt + self.made

    def made_after(self, step: int) -> int:
        """Tokens of its response after a step."""
        return self.base + step if self.decoding else self.made

    def fed_in(self, step: int) -> int:
        """Tokens whose keys and values it has in a step."""
        return self.prompt + self.base - 1 + step if self.decoding else self.fed

    def stop(self) -> None:
        """It has no blocks any more. If it goes on, all its tokens are read again."""
        self.again = self.again or self.fed > 0
        self.parent, self.start, self.fed = None, 0, 0


class DecodingBatch:
    def __init__(self, block: int) -> None:
        self._block = block
        self._crossings = [0] * block  # members that need a new block in steps of each remainder
        self._contexts = 0  # tokens that the members attended to in step 0, had there been one
        self._ends: list[tuple[int, int, EngineSequence]] = []
        self.size = 0

    def add(self, sequence: EngineSequence, step: int) -> None:
        """It has its first token after `step`, and decodes from the next one on."""
        sequence.base = base = sequence.made + 1 - step
        sequence.decoding = True
        sequence.ends = ends = sequence.length - base
        self.size += 1
        self._contexts += sequence.prompt + base - 1
        self._crossings[(2 - sequence.prompt - base) % self._block] += 1
        heappush(self._ends, (ends, sequence.order, sequence))

    def remove(self, sequence: EngineSequence) -> None:
        base = sequence.base
        sequence.decoding = False
        sequence.ends = 0
        self.size -= 1
        self._contexts -= sequence.prompt + base - 1
        self._crossings[(2 - sequence.prompt - base) % self._block] -= 1

    def context(self, step: int) -> int:
        """Tokens that all members attend to in a step."""
        return self._contexts + self.size * step

    def next_end(self) -> int:
        """The step after which the first member has all its tokens. There must be a member."""
        while self._ends[0][2].ends != self._ends[0][0]:
            heappop(self._ends)
        return self._ends[0][0]

    def ended(self, step: int) -> list[EngineSequence]:
        """Members that have all their tokens after a step, in the order in which they were started."""
        found = []
        while self._ends and self._ends[0][0] <= step:
            ends, _, sequence = heappop(self._ends)
            if sequence.ends == ends:
                found.append(sequence)
        return found

    def new_blocks(self, step: int) -> int:
        """Blocks that the members need in a step beyond those that they have."""
        return self._crossings[step % self._block]

    def new_blocks_between(self, after: int, last: int) -> int:
        """The same, over the steps behind `after` up to and with `last`."""
        rounds, rest = divmod(last - after, self._block)
        return rounds * self.size + sum(
            self._crossings[step % self._block] for step in range(after + 1, after + rest + 1)
        )

    def steps_within(self, after: int, last: int, blocks: int) -> int:
        """The last step up to `last` that the members can make after the step `after` with so many new blocks."""
        if -(-(last - after) // self._block) * self.size <= blocks:
            return last
        rounds, blocks = divmod(blocks, self.size)
        step = after + rounds * self._block
        while step < last and (blocks := blocks - self._crossings[(step + 1) % self._block]) >= 0:
            step += 1
        return step


class StepRun:
    """`steps` steps from `begin` on. Each takes `growth_s` longer than the one before, as contexts grow.

    So n steps take n `first_s` + n (n - 1) / 2 `growth_s`, and how many end by a given time follows in closed form.
    """

    __slots__ = ("begin", "done", "end", "first_s", "growth_s", "steps")

    def __init__(self, begin: float, steps: int, first_s: float, growth_s: float) -> None:
        self.begin: Final = begin
        self.first_s: Final = first_s
        self.growth_s: Final = growth_s
        self.steps: Final = steps
        self.end: Final = self.after(steps)
        self.done = 0  # steps that have ended, by the last `follow`

    def after(self, steps: int) -> float:
        """When so many steps have ended."""
        return self.begin + (steps * self.first_s + steps * (steps - 1) // 2 * self.growth_s)

    def follow(self, now: float) -> None:
        """Sets `done` to the steps that end by `now`."""
        if now >= self.end:
            self.done = self.steps
            return
        done = min(max(self.done, self._estimate(now - self.begin)), self.steps - 1)
        while done and self.after(done) > now:
            done -= 1
        while self.after(done + 1) <= now:
            done += 1
        self.done = done

    def steps_until(self, at: float) -> int:
        """The fewest steps that do not end before `at`, which is within the run."""
        self.follow(at)
        return self.done + (self.after(self.done) < at)

    def _estimate(self, elapsed: float) -> int:
        """The root of the closed form, which rounding may put one step off."""
        if elapsed <= 0.0:
            return 0
        if self.growth_s <= 0.0:
            return int(elapsed / self.first_s)
        linear = self.first_s - self.growth_s / 2
        # This form of the root keeps its digits when the growth is small.
        return int(2.0 * elapsed / (linear + sqrt(linear * linear + 2.0 * self.growth_s * elapsed)))
