"""A run on a disturbed cluster, whose every rollout is compared with what an undisturbed one would have brought."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from random import Random
from typing import Final

import numpy as np

from ebbtide.client import Client, Lease
from ebbtide.errors import EbbtideError
from ebbtide.ledger import AttemptRecord
from ebbtide.types.rollout import FinishedRollout, FinishReason, RolloutRequest, SubmitOutcome, TokenChunk
from ebbtide.types.run import AttemptSpan, Run, RunStatus, Sampling
from ebbtide.types.tokens import TOKEN_BYTES, pack_ids, unpack_ids, unpack_tokens
from ebbtide.types.weights import PolicyVersion
from tests.chaos.cluster import FLUSH_TOKENS, SCRIPT, Cluster
from tests.fakes.scripted_engine import END, follow
from tests.support.waiting import wait_until

RUN: Final = "r"
#: By so much the store's clock and those of logs may be apart, in seconds: they round differently.
_CLOCKS_S: Final = 0.25
SPEC: Final = {"name": "chaos", "model": "scripted", "environment": {"name": "none"}}


def make_requests(first: int, count: int, *, version: int = 0) -> list[RolloutRequest]:
    """Rollouts of up to 128 tokens, numbered from `first` on, the same ones whoever makes them."""
    return [_request(number, version) for number in range(first, first + count)]


def _request(number: int, version: int) -> RolloutRequest:
    random = Random(number)
    prompt = [random.randrange(2, SCRIPT.vocab_size) for _ in range(random.randrange(3, 20))]
    return RolloutRequest(
        rollout_id=f"x{number}",
        group_id=f"g{number // 4}",
        episode_id=f"e{number}",
        prompt_ids=pack_ids(prompt),
        sampling=Sampling(max_tokens=random.randrange(64, 129)),
        min_version=version,
        max_version=version,
    )


async def publish(lease: Lease, *, step: int, elements: int = 16) -> PolicyVersion:
    """A version of one tensor of float32."""
    weights = np.random.default_rng(step).random(elements, dtype=np.float32)
    return await lease.publish({"w": weights}, step=step)


class Load:
    """Rollouts of one run, in and out through one lease. Made by `begin`."""

    def __init__(self, cluster: Cluster, client: Client, lease: Lease) -> None:
        self._cluster, self._client, self.lease = cluster, client, lease
        self.requests: dict[str, RolloutRequest] = {}
        self.forgetful = False  # the store may forget a finish: then it comes once more, under another cursor
        self._came: dict[str, dict[str, FinishedRollout]] = defaultdict(dict)  # rollout -> cursor -> finish
        self._chunks: dict[str, list[TokenChunk]] = defaultdict(list)
        #: Of watched rollouts: when, by the wall clock, how many tokens were stored.
        self.seen: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._tasks = [asyncio.create_task(self._collect())]

    @classmethod
    async def begin(cls, cluster: Cluster, client: Client) -> "Load":
        """Submit the run, claim it and publish its first version."""
        await client.submit(SPEC, RUN)
        load = await cls.claim(cluster, client)
        await load.publish(step=0)
        return load

    @classmethod
    async def claim(cls, cluster: Cluster, client: Client, requests: Iterable[RolloutRequest] = ()) -> "Load":
        """Claim the run, once it is free. `requests`: what its former holder submitted."""
        load = cls(cluster, client, await client.acquire(RUN, holder="test"))
        load.requests |= {request.rollout_id: request for request in requests}
        return load

    async def publish(self, *, step: int, elements: int = 16) -> PolicyVersion:
        return await publish(self.lease, step=step, elements=elements)

    async def submit(self, count: int, *, version: int = 0) -> None:
        """Rollouts of up to 128 tokens that are not known yet; those of `version` alone if it is given."""
        made = make_requests(len(self.requests), count, version=version)
        self.requests |= {request.rollout_id: request for request in made}
        outcomes = await self.lease.submit_rollouts(made)
        assert set(outcomes) <= {SubmitOutcome.ACCEPTED, SubmitOutcome.KNOWN}

    def watch_tokens(self, count: int, *, first: int = 0) -> None:
        """Read the tokens of `count` rollouts as they are stored."""
        names = list(self.requests)[first : first + count]
        self._tasks += [asyncio.create_task(self._stream(name)) for name in names]

    async def _stream(self, name: str) -> None:
        async for chunk in self._client.stream_tokens(RUN, name):
            self._chunks[name].append(chunk)
            self.seen[name].append((time.time(), chunk.offset + len(chunk.tokens) // TOKEN_BYTES))

    async def keep_open(self, count: int) -> None:
        """Submit more as others finish, and watch all of them, until cancelled; not in the middle of a submission."""
        while True:
            if (missing := count - self.open) >= 4:
                known = len(self.requests)
                submission = asyncio.create_task(self.submit(missing))
                try:
                    await asyncio.shield(submission)
                finally:
                    await submission
                self.watch_tokens(missing, first=known)
            await asyncio.sleep(0.05)

    @property
    def open(self) -> int:
        """Rollouts that were submitted and have not come back."""
        return len(self.requests) - len(self._came)

    async def _collect(self) -> None:
        async for finish in self.lease.finished():
            self._came[finish.rollout_id][finish.cursor] = finish

    # -- waiting -------------------------------------------------------------------------------------------------

    async def run(self) -> Run:
        return await self._client.run(RUN)

    async def counted(self, name: str, least: int) -> None:
        """Wait until the run's counter has come to `least`."""

        async def reached() -> bool:
            return (await self.run()).counters.get(name, 0) >= least

        await wait_until(reached, timeout=90, interval=0.02, what=f"{name} >= {least}")

    async def more_tokens(self, count: int) -> None:
        """Wait until so many tokens more are stored."""
        await self.counted("tokens_stored", (await self.run()).counters.get("tokens_stored", 0) + count)

    async def all_finished(self, timeout: float = 45) -> None:
        for task in self._tasks:
            if task.done():
                task.result()
        await wait_until(lambda: len(self._came) == len(self.requests), timeout=timeout, what="all rollouts")

    # -- counting ------------------------------------------------------------------------------------------------

    def length(self, name: str) -> int:
        return len(self.expected(name)[0])

    def expected(self, name: str) -> tuple[list[int], list[float]]:
        """Ids and logprobs that an undisturbed run gives."""
        request = self.requests[name]
        script = follow(SCRIPT, unpack_ids(request.prompt_ids).tolist(), request.sampling.max_tokens)
        ids, logprobs = [token for token, _ in script], [logprob for _, logprob in script]
        end = ids.index(END) + 1 if END in ids else len(ids)
        return ids[:end], logprobs[:end]

    def in_flight(self, *workers: str) -> int:
        """How many attempts these workers have begun and not brought to their end."""
        records = self._cluster.ledger(*workers)
        return sum(record.start + record.generated < self.length(record.rollout_id) for record in records)

    def interruptions(self) -> int:
        """How many attempts were begun after a rollout's first."""
        return len(self._cluster.ledger()) - len(self.requests)

    def resumed(self, *, least: int = 1) -> list[AttemptRecord]:
        """Attempts that went on from a stored offset of at least so many tokens."""
        return [record for record in self._cluster.ledger() if record.start >= least]

    def generated_twice(self) -> int:
        """By the workers' own records. Checks that nothing was stored that nobody generated."""
        made: dict[str, int] = defaultdict(int)
        for record in self._cluster.ledger():
            made[record.rollout_id] += record.generated
        over = {name: made[name] - self.length(name) for name in self.requests}
        assert min(over.values()) >= 0, over
        return sum(over.values())

    def check_losses(self) -> None:
        """No more was generated twice than a flush window for each interruption."""
        twice, interruptions = self.generated_twice(), self.interruptions()
        assert twice <= FLUSH_TOKENS * interruptions, f"{twice} tokens in {interruptions} interruptions"

    async def settle(self, timeout: float = 45) -> Run:
        """Wait for all rollouts, check each token, each attempt and each count, and end the run."""
        await self.all_finished(timeout)
        for name in self.requests:
            self._check(name)
        await asyncio.gather(*self._tasks[1:])
        for name, chunks in self._chunks.items():
            self._check_stream(name, chunks)
        await self._check_attempts()
        names = list(self.requests)
        before = (await self.run()).counters
        total = sum(map(self.length, names))
        assert before["tokens_stored"] == total
        assert {before[key] for key in ("submitted", "finished")} == {len(names)}
        assert {before.get(key, 0) for key in ("queued", "running", "trained", "dropped", "dead_lettered")} == {0}
        half = len(names) // 2
        await self.lease.acknowledge(names[:half])
        await self.lease.acknowledge(names[half:], "too_short")
        ended = await self.lease.finish()
        assert (ended.status, ended.dropped) == (RunStatus.FINISHED, {"too_short": len(names) - half})
        assert ended.counters["submitted"] == ended.counters["trained"] + ended.counters["dropped"]
        assert {ended.counters[key] for key in ("queued", "running", "finished", "bytes")} == {0}
        return ended

    def _check(self, name: str) -> None:
        if not self.forgetful:
            assert len(self._came[name]) == 1, f"{name} finished {len(self._came[name])} times"
        (*_, finish) = self._came[name].values()
        request, tokens = self.requests[name], unpack_tokens(finish.tokens)
        ids, logprobs = self.expected(name)
        assert (tokens["id"].tolist(), tokens["logprob"].tolist()) == (ids, logprobs), name
        assert finish.reason is (FinishReason.STOP if ids[-1] == END else FinishReason.LENGTH)
        versions = set(tokens["version"].tolist())
        assert versions == {request.min_version} if request.min_version else min(versions) > 0, name

    async def spans(self) -> list[AttemptSpan]:
        """All attempts that have ended, in that order."""
        return [span async for span in self._client.timeline(RUN)]

    async def _check_attempts(self) -> None:
        """One attempt at a time: each went on where the one before it had ended, and generated what is its own."""
        made = {record.attempt_id: record for record in self._cluster.ledger()}
        spans: dict[str, list[AttemptSpan]] = defaultdict(list)
        for span in await self.spans():
            spans[span.rollout_id].append(span)
        assert spans.keys() == self.requests.keys()
        for name, attempts in spans.items():
            end = 0
            for span in attempts:
                assert span.first == end <= span.last, (name, attempts)
                end = span.last
                if record := made.get(span.attempt_id):  # one that never reached its worker is none of these
                    assert (record.start, record.generated >= span.last - span.first) == (span.first, True), span
                else:
                    assert span.first == span.last, span
            assert (end, attempts[-1].end) == (self.length(name), "finished"), (name, attempts)

    async def check_versions(self) -> None:
        """Each token bears a version that its attempt's worker had at that time: none came from another attempt."""
        submitted = time.time() - (await self.run()).age_s
        for span in await self.spans():
            (*_, finish) = self._came[span.rollout_id].values()
            made = set(unpack_tokens(finish.tokens)["version"][span.first : span.last].tolist())
            begin, end = submitted + span.begin_s - _CLOCKS_S, submitted + span.end_s + _CLOCKS_S
            installed = self._cluster.installed(span.worker_id)
            before = [version for when, version in installed if when <= begin]
            had = {*before[-1:], *(version for when, version in installed if begin < when <= end)}
            assert made <= had, (span, made, had)

    def _check_stream(self, name: str, chunks: list[TokenChunk]) -> None:
        """What a reader saw before, during and after is what was stored in the end: no token was taken back."""
        (*_, finish) = self._came[name].values()
        seen = b""
        for chunk in chunks:
            assert chunk.offset * 12 == len(seen), name
            seen += chunk.tokens
        assert (seen, chunks[-1].reason) == (finish.tokens, finish.reason), name

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert result is None or isinstance(result, EbbtideError | asyncio.CancelledError), result
        await self.lease.release()


#: The fixture of that name: boots the cluster and begins a run on it.
Begin = Callable[..., Awaitable[Load]]
