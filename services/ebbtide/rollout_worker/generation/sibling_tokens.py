"""Hands the engine what other workers make of the groups whose rollouts it drafts for.

Invariant: keeps nothing but what it has not handed over yet, at most `_MOST_TOKENS`; beyond that news are dropped, for
they are of use to drafts alone. Lost with the process.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from ebbtide.rollout_worker.engine import Engine, SiblingRun
from ebbtide.rollout_worker.generation.local_attempts import LocalAttempts
from ebbtide.types.tokens import pack_ids

#: News are handed over together after this time: each message costs the engine's process a part of a step.
_GATHER_S: Final = 0.02
_MOST_TOKENS: Final = 1 << 20


class SiblingTokens:
    """`engine`: drafts for `attempts`."""

    def __init__(self, engine: Engine, attempts: LocalAttempts) -> None:
        self._engine, self._attempts = engine, attempts
        self._runs: list[SiblingRun] = []
        self._ended: list[str] = []
        self._tokens = 0
        self._due: asyncio.TimerHandle | None = None

    def groups_held(self) -> frozenset[str]:
        """The groups that tokens of siblings are of use for."""
        return self._attempts.drafted_groups if self._engine.speculates else frozenset()

    def add(self, group_id: str, version: int, rollout_id: str, offset: int, token_ids: Sequence[int]) -> None:
        """Add consecutive tokens of a rollout that another worker made under one version, from token `offset` on.
        Returns at once. Repeats are harmless."""
        if self._engine.speculates and self._tokens + len(token_ids) <= _MOST_TOKENS:
            self._runs.append(SiblingRun(group_id, version, rollout_id, offset, pack_ids(token_ids)))
            self._tokens += len(token_ids)
            self._soon()

    def end(self, group_id: str) -> None:
        """No rollout of the group will be drafted here any more."""
        if self._engine.speculates:
            self._runs = [run for run in self._runs if run.group != group_id]
            self._ended.append(group_id)
            self._soon()

    def _soon(self) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(_GATHER_S, self._hand_over)

    def _hand_over(self) -> None:
        runs, ended = self._runs, self._ended
        self._runs, self._ended, self._tokens, self._due = [], [], 0, None
        self._engine.learn_siblings(runs, ended)
