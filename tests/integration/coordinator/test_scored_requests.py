"""Requests to score prompts: given to workers that say that they score, and asked again whole after a loss."""

from typing import Any

import pytest

from ebbtide.append_stream import AppendDelta
from ebbtide.coordinator.dispatch import unserved_work
from ebbtide.coordinator.fleet import worker_registry
from ebbtide.errors import InvalidRequest, NoCapacity, NotReady
from ebbtide.store.scripts import run_key
from ebbtide.types.fleet import AttemptRef
from ebbtide.types.rollout import FinishReason, RolloutKind, RolloutRequest, SubmitOutcome
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import MAX_RECORDS, pack_ids, pack_scores, pack_tokens
from ebbtide.wire import from_proto
from tests.fakes.scripted_engine import script_scores
from tests.fakes.scripted_settings import ScriptedSettings
from tests.fakes.scripted_worker import ScriptedWorker
from tests.integration.coordinator.gateways import answer, asked, gateway

SCORES = {"capabilities": ["resume", "score"]}
PROMPT = [1, 2, 3]


def to_score(rollout_id: str, **more: Any) -> RolloutRequest:
    return asked(rollout_id, **({"sampling": Sampling(max_tokens=1), "prompt_logprobs": 2} | more))


def scores(token: int = 20, version: int = 1) -> bytes:
    places = script_scores(ScriptedSettings(), [*PROMPT, token], 2)
    return pack_scores(places, pack_tokens([token], [-0.25], version))


async def score(worker: ScriptedWorker, rollout_id: str, packed: bytes) -> None:
    ref = from_proto(worker.assigned[rollout_id].attempt, AttemptRef)
    (ack,) = await worker.send(AppendDelta(ref, 0, packed, FinishReason.LENGTH))
    assert ack.finished


async def test_only_a_worker_that_scores_gets_a_prompt_to_score(cluster: Any) -> None:
    await cluster.run()
    plain = await cluster.worker("plain", slots=64)
    async with gateway(cluster) as lease:
        with pytest.raises(NotReady, match="no attached worker scores prompts; start workers whose engine scores them"):
            await lease.submit_rollouts([to_score("a")])
        await lease.submit_rollouts([asked("b")])
        await plain.has("b")
        scorer = await cluster.worker("scorer", slots=2, **SCORES)
        await lease.submit_rollouts([*map(to_score, "acd")])
        await scorer.has("a", "c")
        assert scorer.assigned["a"].prompt_logprobs == 2
        assert not plain.assigned["b"].HasField("prompt_logprobs")
        await score(scorer, "a", scores())
        await scorer.has("d")
        assert set(plain.assigned) == {"b"}
        found, last = await answer(lease, "a")
        assert (found, last.reason) == (scores(), FinishReason.LENGTH)


async def test_only_a_worker_that_samples_with_min_p_gets_a_request_with_it(cluster: Any) -> None:
    await cluster.run()
    plain = await cluster.worker("plain", slots=64)
    cut = {"sampling": Sampling(min_p=0.25)}
    async with gateway(cluster) as lease:
        with pytest.raises(NotReady, match="no attached worker samples with min_p"):
            await lease.submit_rollouts([asked("a", **cut)])
        able = await cluster.worker("able", capabilities=["resume", "min_p"])
        await lease.submit_rollouts([asked("a", **cut), asked("b", **cut)])
        await able.has("a", "b")
        assert able.assigned["a"].sampling.min_p == 0.25
        assert not plain.assigned


async def test_a_lost_workers_prompt_is_scored_anew_by_another(cluster: Any) -> None:
    await cluster.run()
    first = await cluster.worker("w1", **SCORES)
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([to_score("a")])
        await first.has("a")
        await first.break_streams()
        second = await cluster.worker("w2", **SCORES)
        await second.has("a")
        assert (second.assigned["a"].partial, second.assigned["a"].prompt_logprobs) == (b"", 2)
        await score(second, "a", scores(version=2))
        assert (await answer(lease, "a"))[0] == scores(version=2)


async def test_a_coordinator_that_restarts_still_knows_what_is_to_be_scored(cluster: Any) -> None:
    await cluster.run()
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([to_score("a")])
    await cluster.restart()
    plain, scorer = await cluster.worker("plain"), await cluster.worker("scorer", **SCORES)
    await scorer.has("a")
    assert (scorer.assigned["a"].prompt_logprobs, plain.assigned) == (2, {})


async def test_a_repeat_finds_its_scores_when_nobody_scores_any_more(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.run()
    worker = await cluster.worker("w1", **SCORES)
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([to_score("a")])
        await worker.has("a")
        await score(worker, "a", scores())
        await worker.break_streams()
        await cluster.worker("plain")
        assert await lease.submit_rollouts([to_score("a")]) == [SubmitOutcome.KNOWN]
        assert (await answer(lease, "a"))[0] == scores()
        await lease.submit_rollouts([to_score("b")])  # the worker may come again
        monkeypatch.setattr(worker_registry, "_LOST_KEPT_S", 0.0)
        with pytest.raises(NotReady):
            await lease.submit_rollouts([to_score("c")])
        assert await lease.submit_rollouts([to_score("a")]) == [SubmitOutcome.KNOWN]


async def test_prompts_that_nobody_can_score_any_more_are_given_up_with_the_reason(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unserved_work, "_SCORER_GRACE_S", 0.2)
    await cluster.run()
    worker = await cluster.worker("w1", **SCORES)
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([to_score("a")])
        await worker.has("a")
        await worker.break_streams()
        await cluster.worker("plain")
        _, last = await answer(lease, "a")
        assert last.reason is FinishReason.DEAD_LETTERED
        assert last.message.startswith("no attached worker has scored prompts for 0.2 s; start workers")


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        ({"sampling": Sampling(max_tokens=2)}, r"rollouts\[0\].sampling.max_tokens: must be 1"),
        ({"prompt_logprobs": 21}, r"rollouts\[0\].prompt_logprobs: "),
        ({"prompt_ids": pack_ids([1] * MAX_RECORDS)}, r"rollouts\[0\].prompt_logprobs: 131072 tokens with 2"),
    ],
)
async def test_what_cannot_be_scored_is_refused_by_its_field(cluster: Any, more: dict[str, Any], refusal: str) -> None:
    await cluster.run()
    async with gateway(cluster) as lease:
        with pytest.raises(InvalidRequest, match=refusal):
            await lease.submit_rollouts([to_score("a", **more)])


async def test_training_rollouts_are_not_scored(cluster: Any) -> None:
    run = await cluster.run()
    with pytest.raises(InvalidRequest, match="only requests are scored"):
        await run.submit("t", kind=RolloutKind.TRAIN, sampling=Sampling(max_tokens=1), prompt_logprobs=0)


async def test_scores_are_counted_as_the_one_token_that_was_sampled(cluster: Any) -> None:
    run = await cluster.run()
    worker = await cluster.worker("w1", **SCORES)
    async with gateway(cluster) as lease:
        await lease.submit_rollouts([to_score("a")])
        await worker.has("a")
        await score(worker, "a", scores())
        await answer(lease, "a")
    assert await run.count("tokens_stored") == 1
    ((_, fields),) = await cluster.coordinator.link.call("XRANGE", run_key("r", "REQUEST_SPANS"), "-", "+")
    span = dict(zip(fields[::2], fields[1::2], strict=True))
    assert (span[b"f"], span[b"l"]) == (b"0", b"1")


async def test_scores_count_towards_the_quota_from_their_submit_on_and_leave_training_its_part(cluster: Any) -> None:
    quota, prompt = 1 << 20, [1] * 250
    run = await cluster.run(quota_bytes=quota)
    more: dict[str, Any] = {"prompt_ids": pack_ids(prompt), "prompt_logprobs": 20}
    packed = pack_scores(script_scores(ScriptedSettings(), [*prompt, 20], 20), pack_tokens([20], [-0.25], 1))
    room = quota * 3 // 4 // (len(packed) + 4 * len(prompt))
    ids = [f"a{number}" for number in range(room)]
    async with gateway(cluster) as lease:
        empty = await run.count("bytes")
        await lease.submit_rollouts([to_score(one, **more) for one in ids[:-1]])
        with pytest.raises(NoCapacity, match="quota_bytes"):
            await lease.submit_rollouts([to_score("z0", **more), to_score("z1", **more)], wait=False)
        assert await run.submit("t")
        await lease.cancel_rollouts(ids[1:-1])
        worker = await cluster.worker("w1", **SCORES)
        await worker.has(ids[0])
        await score(worker, ids[0], packed)
        await answer(lease, ids[0])
        await run.cancel("t")
        kept = 4 * len(prompt) * (room - 1) + len(packed)
        assert await run.count("bytes") == empty + kept
