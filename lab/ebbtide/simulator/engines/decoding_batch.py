"""Sums up the sequences that decode, so that nothing is done for each of them at each step.

Steps are numbered from 1 on over the engine's life. A sequence's `base` and the number of a step add up to the tokens
that its response has after that step.

Invariant: the sums are those of the members. A member's entry in `_ends` has the step of its `ends`; other entries of
it are old, and are dropped when they come first.
"""

from heapq import heappop, heappush

from ebbtide.simulator.engines.engine_sequence import EngineSequence


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
