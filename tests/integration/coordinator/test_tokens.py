"""The way of a rollout through two streams, and the fences on it."""

from ebbtide.v1 import types_pb2
from ebbtide.v1.fleet_pb2 import AppendAck

STOP = types_pb2.FINISH_REASON_STOP


async def test_a_rollout_goes_from_submit_to_a_worker_to_the_finished_stream(cluster):
    run = await cluster.run()
    worker = await cluster.worker("w1")
    assert await run.submit("a", "b") == [1, 1]
    await worker.has("a", "b")
    assert worker.installed == [1]
    ack = await worker.add("a", 0, 8)
    assert (ack.status, ack.stored, ack.finished) == (AppendAck.STATUS_STORED, 8, False)
    assert (await worker.add("a", 8, 2, STOP)).finished
    (done,) = await run.finished(1)
    assert done.rollout_id == "a"
    assert len(done.tokens) == 10 * 12
    assert done.reason == STOP
