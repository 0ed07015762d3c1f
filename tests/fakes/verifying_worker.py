"""Plays a worker whose engine verifies drafts of responses that are known beforehand.

The drafts are made by `DraftedBatch`, the part of the proposer that knows no vLLM, as in an engine's process.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ebbtide.rollout_worker.engine import DraftSource
from ebbtide.rollout_worker.engine.vllm.group_drafts import BatchRow, DraftedBatch
from tests.fakes.plain_suffix_tree import PlainSuffixTree

_PROMPT: Final = [0, 1, 2]
_STEP_S: Final = 0.01


class VerifyingWorker:
    """`responses`: of one group, by rollout. Of each the first `moved` tokens were made by another worker."""

    def __init__(
        self, responses: Mapping[str, Sequence[int]], *, moved: int = 0, longest: int = 4, most: int = 2_048
    ) -> None:
        self.batch = DraftedBatch(PlainSuffixTree, longest=longest, most=most, most_bytes=1 << 28)
        self.now = 100.0
        self.steps = self.made = 0
        self.responses = dict(responses)
        self._at = dict.fromkeys(responses, moved)
        self._began = dict(self._at)
        self._drafts: dict[str, list[int]] = {}

    @property
    def drafted(self) -> int:
        """Tokens that the next step verifies beside those of a step without drafts."""
        return sum(map(len, self._drafts.values()))

    def run(self) -> None:
        while self._running():
            self.step()

    def step(self, **changes: Any) -> None:
        """Verify the drafts of all that run, and draft again. `changes`: of the rows that the batch is shown."""
        names = self._running()
        self.now += _STEP_S
        rows = [self._row(name)._replace(**changes) for name in names]
        drafts = self.batch.step(rows, self.now)
        self._drafts = dict(zip(names, drafts, strict=True))
        self.steps += 1

    def join(self, name: str, response: Sequence[int]) -> None:
        """Another rollout of the group comes, of which nothing is made yet."""
        self.responses[name] = response
        self._at[name] = self._began[name] = 0

    def _running(self) -> list[str]:
        return [name for name, response in self.responses.items() if self._at[name] < len(response)]

    def _row(self, name: str) -> BatchRow:
        response, at, draft = self.responses[name], self._at[name], self._drafts.get(name, [])
        accepted = 0
        while accepted < len(draft) and at + accepted < len(response) and response[at + accepted] == draft[accepted]:
            accepted += 1
        made = min(accepted + 1, len(response) - at)
        self._at[name] = at + made
        self.made += made
        text = [*_PROMPT, *response[: at + made]]
        moved = self._began[name]
        return BatchRow(
            name=name,
            source=DraftSource(group="g", rollout_id=name, made=moved),
            prompt=len(_PROMPT) + moved,
            tokens=lambda first, last: text[first:last],
            length=len(text),
            made=made,
            room=len(response) - at - made - 1,
        )
