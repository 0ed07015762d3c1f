"""Plays a worker whose engine verifies drafts of responses that are known beforehand, in virtual time.

The drafts are made by `DraftedBatch`, the part of the proposer that knows no vLLM, as in an engine's process.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ebbtide.rollout_worker.engine import DraftSource, SiblingRun
from ebbtide.rollout_worker.engine.vllm.drafts.drafted_batch import BatchRow, DraftedBatch
from ebbtide.rollout_worker.engine.vllm.drafts.group_trees import SuffixTree
from ebbtide.types.tokens import pack_ids

VERSION: Final = 1
_PROMPT: Final = [0, 1, 2]


class VerifyingWorker:
    """`responses`: of one group, by rollout. A step takes `base_s`, and `token_s` for each token that it verifies."""

    def __init__(
        self,
        make: Callable[[int], SuffixTree],
        responses: Mapping[str, Sequence[int]],
        *,
        group: str = "g",
        base_s: float,
        token_s: float,
        now: float = 0.0,
    ) -> None:
        self.batch = DraftedBatch(make, longest=8, most=2_048, most_bytes=1 << 28)
        self.batch.install(VERSION)
        self.now = now
        self.steps = self.made = self.verifications = 0
        self._responses, self._group = responses, group
        self._base_s, self._token_s = base_s, token_s
        self._at = dict.fromkeys(responses, 0)
        self._drafts: dict[str, list[int]] = {}

    @property
    def accept_length(self) -> float:
        """Tokens of a sample in a step, on average, the one that verification adds included."""
        return self.made / self.verifications

    @property
    def done(self) -> bool:
        return not self._running()

    @property
    def drafted(self) -> int:
        """Tokens that the next step verifies beside those of a step without drafts."""
        return sum(map(len, self._drafts.values()))

    def made_of(self, rollout: str) -> int:
        return self._at[rollout]

    def news(self, since: Mapping[str, int]) -> list[SiblingRun]:
        """What was made since, as other workers get it."""
        return [
            SiblingRun(self._group, VERSION, name, since.get(name, 0), pack_ids(response[since.get(name, 0) : at]))
            for (name, response), at in zip(self._responses.items(), self._at.values(), strict=True)
            if at > since.get(name, 0)
        ]

    def run(self) -> None:
        while not self.done:
            self.step()

    def step(self, **changes: Any) -> None:
        """Verify the drafts of all that run, and draft again. `changes`: of the rows that the batch is shown."""
        names = self._running()
        self.now += self._base_s + self._token_s * (len(names) + self.drafted)
        rows = [self._row(name)._replace(**changes) for name in names]
        drafts = self.batch.step(rows, self.now, lambda: self.now)
        self._drafts = dict(zip(names, drafts, strict=True))
        self.steps += 1
        self.verifications += len(names)

    def _running(self) -> list[str]:
        return [name for name, response in self._responses.items() if self._at[name] < len(response)]

    def _row(self, name: str) -> BatchRow:
        response, at, draft = self._responses[name], self._at[name], self._drafts.get(name, [])
        accepted = 0
        while accepted < len(draft) and at + accepted < len(response) and response[at + accepted] == draft[accepted]:
            accepted += 1
        made = min(accepted + 1, len(response) - at)
        self._at[name] = at + made
        self.made += made
        text = [*_PROMPT, *response[: at + made]]
        return BatchRow(
            name=name,
            source=DraftSource(group=self._group, rollout_id=name, made=0),
            prompt=len(_PROMPT),
            tokens=lambda first, last: text[first:last],
            length=len(text),
            made=made,
            room=len(response) - at - made - 1,
        )
