"""Keeps what a worker is fed of its siblings, and insists that it comes in order, each token once."""

from collections.abc import Sequence


class RecordedSink:
    def __init__(self) -> None:
        self.ids: dict[str, dict[str, list[int]]] = {}  # by group and rollout
        self.starts: dict[str, int] = {}  # by rollout: where its tokens begin
        self.versions: set[int] = set()
        self.ended: list[str] = []

    def add(self, group_id: str, version: int, rollout_id: str, offset: int, token_ids: Sequence[int]) -> None:
        ids = self.ids.setdefault(group_id, {}).setdefault(rollout_id, [])
        start = self.starts.setdefault(rollout_id, offset)
        assert offset == start + len(ids), f"{rollout_id}: {offset} after {start + len(ids)}"
        ids += token_ids
        self.versions.add(version)

    def end(self, group_id: str) -> None:
        self.ended.append(group_id)
        for rollout_id in self.ids.pop(group_id, {}):
            self.starts.pop(rollout_id)
