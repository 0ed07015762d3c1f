"""Siblings' tokens go with the answers of the stream that a worker opened last."""

from typing import Any

from ebbtide.coordinator.appends.sibling_feeds import CAPABILITY, SiblingFeeds
from ebbtide.scheduling.long_tail.feeds.sibling_groups import SiblingGroups
from ebbtide.types.append_delta import AppendColumns
from ebbtide.types.tokens import pack_tokens
from ebbtide.v1 import fleet_pb2


class Attached:
    """What feeds ask of a session and of its hello."""

    def __init__(self) -> None:
        self.hello, self.capabilities, self.attempts, self.gone = self, [CAPABILITY], dict[str, Any](), False


class Made:
    """An attempt at a rollout of one group."""

    group_id, stored = "g", 0

    def __init__(self, session: object) -> None:
        self.session: object | None = session


def test_an_answer_on_a_stream_that_was_replaced_takes_nothing_from_its_successor() -> None:
    worker: Any = Attached()
    store: Any = None  # nothing is read
    feeds, groups = SiblingFeeds(store), SiblingGroups("r")
    with feeds.reading(worker, []) as former, feeds.reading(worker, []) as now:
        assert former is not None
        assert now is not None
        mine, other, fed = Made(worker), Made(object()), {worker: now.feed}
        groups.begin("x", mine, 0, fed)
        groups.begin("y", other, 0, fed)
        stored = AppendColumns("r", ["y"], ["a"], [2], [2], pack_tokens([1, 2], [-0.5] * 2, 1), {})
        groups.stored(stored, [other], (), fed)
        lost, heard = fleet_pb2.AppendResponse(), fleet_pb2.AppendResponse()
        feeds.tell(former, lost)
        feeds.tell(now, heard)
    assert not lost.HasField("siblings")
    assert list(heard.siblings.counts) == [2]
