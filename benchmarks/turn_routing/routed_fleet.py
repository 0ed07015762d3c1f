"""Plays one policy on one fleet and one crowd of sessions, in virtual time."""

from collections.abc import Callable
from random import Random
from typing import Final

from msgspec import Struct

from benchmarks.turn_routing.session_crowd import RUN, CrowdCounts, SessionCrowd
from benchmarks.turn_routing.session_work import RESPONSE, SessionWork, mean_context
from ebbtide.simulator.engines.engine_profile import EngineProfile, KvCapacity, StepCosts
from ebbtide.simulator.outcome import SimulationBooks
from ebbtide.simulator.world.fleet.simulated_worker import SimulatedWorker, WorkerTerms
from ebbtide.simulator.world.fleet.version_pulls import VersionPulls, WeightTerms
from ebbtide.simulator.world.virtual_coordinator import Decider, RunAccount, VirtualCoordinator
from ebbtide.simulator.world.virtual_time import VirtualTime
from ebbtide.types.fleet import WorkerKind

WORKERS: Final = 8
#: Turns that an engine runs at once.
SEQUENCES: Final = 32
#: Seconds of a step: 8 ms whatever it computes (about what an 8B network takes to read its weights on an A100), and
#: what a decoding sequence and its context add.
_BASE_S: Final = 8e-3
_SEQUENCE_S: Final = 150e-6
_CONTEXT_S: Final = 50e-9
_BATCHED_TOKENS: Final = 8192
#: A whole prefill step makes so many times the tokens per second of a full decoding one.
PREFILL_OVER_DECODE: Final = 8.0
#: As an older generation of devices is to a newer one, in compute more than in bandwidth.
SLOWER: Final = 6.0
#: Blocks for more tokens than all sessions of a trial have.
_KV_TOKENS: Final = 1 << 26
_REPLACED_S: Final = 60.0
_CONTEXT: Final = 131_072


class TrialSetting(Struct, frozen=True, kw_only=True):
    sessions: int  # at a time
    wait_s: float = 5.0  # of an environment, on average
    losses_per_hour: float = 0.0  # of the whole fleet
    warm_s: float = 90.0  # before anything counts; sessions begin in its first half
    counted_s: float = 240.0
    kv_tokens: int = _KV_TOKENS
    slow_readers: int = 0  # workers that need `SLOWER` times as long for a token of a prompt
    slots: int = SEQUENCES  # turns that a worker is given; those beyond `SEQUENCES` wait in its engine


class TrialFigures(Struct, frozen=True, kw_only=True):
    """Of the time that counts."""

    tokens_per_s: float  # made, without those made twice
    turn_s: float  # from submission to the last token, on average
    hits: float  # share of the repeated tokens that were not read again
    prompt_share: float  # of all tokens
    repeated_share: float  # of the prompts' tokens
    turns: int
    losses: int = 0


def profile(kv_tokens: int = _KV_TOKENS, *, slower: float = 1.0) -> EngineProfile:
    """An engine whose prefill is `PREFILL_OVER_DECODE` times as fast as its decoding with all sequences; or whose
    tokens of prompts take so many times as long.
    """
    slots, context = SEQUENCES, SEQUENCES * mean_context()
    fixed_s = _BASE_S + slots * _SEQUENCE_S + context * _CONTEXT_S
    # batched / (base + batched t) = 8 slots / (fixed + slots t), solved for t
    token_s = (_BATCHED_TOKENS * fixed_s - PREFILL_OVER_DECODE * slots * _BASE_S) / (
        _BATCHED_TOKENS * slots * (PREFILL_OVER_DECODE - 1.0)
    )
    costs = StepCosts(base_s=_BASE_S, token_s=slower * token_s, sequence_s=_SEQUENCE_S, context_s=_CONTEXT_S)
    return EngineProfile(
        name="turns",
        model="turns",
        device="none",
        gpus=1,
        source="made up: see benchmarks/turn_routing/routed_fleet.py",
        costs=costs,
        kv=KvCapacity(tokens=kv_tokens),
        batched_tokens=_BATCHED_TOKENS,
        sequences=SEQUENCES,
    )


def speeds() -> tuple[float, float]:
    """Tokens/s of an engine: in a whole prefill step, and decoding with all sequences at the mean context."""
    costs = profile().costs
    decode_s = costs.step_s(batch=SEQUENCES, context=SEQUENCES * mean_context())
    return _BATCHED_TOKENS / costs.step_s(batch=0, context=0, prefill=_BATCHED_TOKENS), SEQUENCES / decode_s


class RoutedFleet:
    def __init__(self, setting: TrialSetting, seed: int, decider: Callable[[VirtualCoordinator], Decider]) -> None:
        self._setting, self._seed = setting, seed
        self._time, self._books = VirtualTime(), SimulationBooks()
        pulls = VersionPulls(self._time, 1e12)
        pulls.add_run(RUN, WeightTerms(dense_bytes=1, patch_bytes=0))
        self._coordinator = VirtualCoordinator(self._time, self._books, pulls, decider)
        work = SessionWork(seed=seed, wait_s=setting.wait_s)
        self._crowd = SessionCrowd(setting.sessions, work, self._time, self._coordinator, setting.warm_s / 2)
        account = RunAccount(name=RUN, model="turns", max_tokens=64 * int(RESPONSE))
        self._coordinator.add_run(account, self._crowd)
        self._workers: list[SimulatedWorker] = []
        self._began = 0
        self._losses = 0

    def run(self) -> TrialFigures:
        """Let the time of the setting pass."""
        for _ in range(WORKERS):
            self._start(0.0)
        self._coordinator.begin()
        self._coordinator.announce(RUN, 1, 0)
        self._crowd.begin()
        self._plan_losses()
        self._pass_until(self._setting.warm_s)
        before, made, read = _copy(self._crowd.counts), self._made(), self._read()
        self._pass_until(self._setting.warm_s + self._setting.counted_s)
        return self._figures(before, self._made() - made, self._read() - read)

    def _pass_until(self, until_s: float) -> None:
        while self._time.next <= until_s:
            self._time.step()
        self._time.now = until_s

    def _start(self, boot_s: float) -> None:
        setting, self._began = self._setting, self._began + 1
        terms = WorkerTerms(
            pool="fleet",
            kind=WorkerKind.RESERVED,
            profile=profile(setting.kv_tokens, slower=SLOWER if self._began <= setting.slow_readers else 1.0),
            max_model_len=_CONTEXT,
            slots=setting.slots,
            heartbeat_s=self._coordinator.settings.heartbeat_s,
            seed=self._seed,
        )
        worker = SimulatedWorker(f"w{self._began:03}", terms, self._time, self._coordinator, self._books)
        self._workers.append(worker)
        worker.boot(boot_s)

    def _plan_losses(self) -> None:
        """Losses come evenly over the time that counts: in each part of it one, at a drawn moment."""
        setting, draw = self._setting, Random(f"{self._seed} losses")
        count = round(setting.losses_per_hour * setting.counted_s / 3600.0)
        for number in range(count):
            at_s = setting.warm_s + (number + draw.random()) * setting.counted_s / count
            self._time.at(at_s, lambda: self._lose(draw))

    def _lose(self, draw: Random) -> None:
        there = [worker for worker in self._workers if not worker.gone]
        draw.choice(there).vanish(silently=True)
        self._losses += 1
        self._start(_REPLACED_S)

    def _made(self) -> int:
        for worker in self._workers:
            if not worker.gone:
                worker.host.look()
        return sum(worker.host.engine.generated for worker in self._workers) - self._books.tokens.twice

    def _read(self) -> int:
        return sum(worker.host.engine.read for worker in self._workers)

    def _figures(self, before: CrowdCounts, made: int, read: int) -> TrialFigures:
        after = self._crowd.counts
        turns, prompts = after.turns - before.turns, after.prompts - before.prompts
        responses, repeated = after.responses - before.responses, after.repeated - before.repeated
        return TrialFigures(
            tokens_per_s=made / self._setting.counted_s,
            turn_s=(after.turn_s - before.turn_s) / turns,
            hits=(prompts - read) / repeated,
            prompt_share=prompts / (prompts + responses),
            repeated_share=repeated / prompts,
            turns=turns,
            losses=self._losses,
        )


def _copy(counts: CrowdCounts) -> CrowdCounts:
    return CrowdCounts(counts.turns, counts.responses, counts.prompts, counts.repeated, counts.turn_s)
