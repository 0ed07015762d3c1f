"""Plays blocks of sessions on real engines: each turn's prompt is all before it, with what an environment adds.

The lengths are those of the simulated comparison, scaled; the tokens are random, and no two blocks share any prefix.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from random import Random

from msgspec import Struct

from benchmarks.turn_routing.engines.engine_fleet import CONTEXT, VOCABULARY, EngineFleet, PromptTokens
from benchmarks.turn_routing.session_work import SessionWork
from ebbtide.client import Lease
from ebbtide.simulator.scenario.workload import Turn
from ebbtide.types.rollout import RolloutRequest
from ebbtide.types.run import Sampling
from ebbtide.types.tokens import pack_ids, unpack_tokens


class BlockPlan(Struct, frozen=True, kw_only=True):
    """One block: at each place, sessions one after another."""

    seed: int
    places: int = 20  # more than the fleet has slots: environments are at work in the others
    sessions: int = 3  # at each place
    wait_s: float = 0.5  # of an environment, on average
    scale: float = 0.25  # of the lengths of `SessionWork`


class BlockFigures(Struct, frozen=True, kw_only=True):
    rule: str
    seconds: float
    turns: int
    tokens_per_s: float  # made
    session_s: float  # of a session, without its environment's time, on average
    prompts: int  # tokens of prompts
    repeated: int  # of these, what earlier turns of the session had
    engines: PromptTokens

    @property
    def hits(self) -> float:
        """Share of the repeated tokens that the engines had."""
        return self.engines.cached / self.repeated


class TurnAsker:
    """Asks for single turns, and waits for their finishes."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._asked: dict[str, asyncio.Future[list[int]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def ask(self, episode: str, number: int, prompt: Sequence[int], length: int) -> list[int]:
        """The ids of a response of this length."""
        name = f"{episode}-{number}"
        answer = self._asked[name] = asyncio.get_running_loop().create_future()
        request = RolloutRequest(
            rollout_id=name,
            group_id=episode,
            episode_id=episode,
            prompt_ids=pack_ids(prompt),
            sampling=Sampling(temperature=1.0, max_tokens=length, ignore_eos=True),
        )
        await self._lease.submit_rollouts([request])
        ids: list[int] = await answer
        return ids

    async def close(self) -> None:
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader

    async def _read(self) -> None:
        try:
            async with contextlib.aclosing(self._lease.finished()) as finishes:
                async for finish in finishes:
                    if answer := self._asked.pop(finish.rollout_id, None):
                        answer.set_result(unpack_tokens(finish.tokens)["id"].tolist())
                        await self._lease.acknowledge([finish.rollout_id])
        except Exception as error:
            for answer in self._asked.values():
                answer.set_exception(error)
            raise


class SessionBlock:
    """One block under one rule; the same plan has the same lengths and waits under each."""

    def __init__(self, fleet: EngineFleet, asker: TurnAsker, plan: BlockPlan, rule: str) -> None:
        self._fleet, self._asker, self._plan, self._rule = fleet, asker, plan, rule
        self._work = SessionWork(seed=plan.seed, wait_s=plan.wait_s, scale=plan.scale)
        self._turns = self._made = self._prompts = self._repeated = 0
        self._session_s = 0.0

    async def play(self) -> BlockFigures:
        plan, before, began = self._plan, await self._fleet.prompt_tokens(), time.monotonic()
        self._fleet.place_by(self._rule)
        async with asyncio.TaskGroup() as group:
            for place in range(plan.places):
                group.create_task(self._play_place(place))
        seconds = time.monotonic() - began
        return BlockFigures(
            rule=self._rule,
            seconds=seconds,
            turns=self._turns,
            tokens_per_s=self._made / seconds,
            session_s=self._session_s / (plan.places * plan.sessions),
            prompts=self._prompts,
            repeated=self._repeated,
            engines=(await self._fleet.prompt_tokens()).since(before),
        )

    async def _play_place(self, place: int) -> None:
        for number in range(self._plan.sessions):
            episode = f"{self._rule}-{self._plan.seed}-{place}-{number}"
            await self._play_session(episode, self._work.turns(place, number), Random(episode))

    async def _play_session(self, episode: str, turns: Sequence[Turn], tokens: Random) -> None:
        known: list[int] = []
        for number, turn in enumerate(turns):
            if turn.prompt + turn.response > CONTEXT:
                return
            prompt = known + [tokens.randrange(1, VOCABULARY - 1) for _ in range(turn.prompt - len(known))]
            began = time.monotonic()
            response = await self._asker.ask(episode, number, prompt, turn.response)
            self._session_s += time.monotonic() - began
            self._turns, self._made = self._turns + 1, self._made + len(response)
            self._prompts, self._repeated = self._prompts + len(prompt), self._repeated + len(known)
            known = prompt + response
            await asyncio.sleep(turn.wait_s)
