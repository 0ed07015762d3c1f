"""Follows ROSE's co-serving policy as it is reported (arXiv 2605.06534; from notes on it, since there is no code).

A rival of the governor. At each moment, over the served requests r, with offline tables That of the served engine's
own latencies:

    S_prf(r) = t_arrive(r) + B_TTFT - now - That_prf(L_r)        where r waits for its first token
    S_dec(r) = t_last_token(r) + B_TPOT - now - That_dec(b)      where it decodes
    rollouts are admitted iff min S_prf > 0 and min S_dec > 0

Memory: the rollouts' KV budget R is fixed for an RL step, and headroom H is kept for serving. Once the served engine's
use of H crosses a watermark, R is halved, once; victims are aborted whole; R stays frozen until the next RL step.

Told: arrivals, prompt lengths, tokens and ends of served requests, the SLO, the tables, and the tokens inside.
Not told: how long a rollout step takes, which requests queue behind others, and how rollouts changed latencies.
"""
# ruff: noqa: ARG002 - a rival does not use all that it is told

from msgspec import Struct

from ebbtide.errors import InvalidRequest
from ebbtide.serving_guard.borrowers import AllowedMemory
from ebbtide.serving_guard.governor.budget_decider import (
    NOTHING_INSIDE,
    BudgetDecider,
    BudgetDecision,
    LatencyTargets,
    LearntCosts,
    StepLimits,
)
from ebbtide.serving_guard.governor.memory import CUT, NORMAL
from ebbtide.serving_guard.memory_budget import MemoryBudget
from ebbtide.types.grants import GRANT_S, BorrowerReport, Budget, Forecast, Hello, Residency


class RoseSetting(Struct, frozen=True, kw_only=True):
    """What the reports on ROSE do not state."""

    step_s: float = 600.0  # length of an RL step; an RL step took ROSE 500 to 1,000 s
    watermark: float = 1.0  # part of the headroom whose use by serving halves the rollouts' budget
    headroom: float = 0.2  # part of the memory
    held: float = 1.0  # part of B_TTFT and B_TPOT that the test reckons with

    @classmethod
    def parse(cls, text: str) -> "RoseSetting":
        """Read `STEP_S,WATERMARK,HEADROOM,HELD`. Raises `InvalidRequest`."""
        try:
            step_s, watermark, headroom, held = map(float, text.split(","))
        except ValueError:
            raise InvalidRequest(f"{text!r} is not STEP_S,WATERMARK,HEADROOM,HELD", field="rose") from None
        if not (0 < step_s < 1e9 and 0 <= watermark <= 1 and 0 <= headroom < 1 and 0 <= held <= 1):
            raise InvalidRequest(f"{text!r}: STEP_S must be above 0, the others from 0 to 1", field="rose")
        return cls(step_s=step_s, watermark=watermark, headroom=headroom, held=held)


class RoseTables(Struct, frozen=True, kw_only=True):
    """That_prf and That_dec of the served model, in seconds."""

    prefill_s: float  # of a prompt
    prefill_token_s: float  # and of each of its tokens
    decode_s: float  # of one request
    decode_more_s: float  # and of each further one

    def prefill(self, tokens: int) -> float:
        return self.prefill_s + self.prefill_token_s * tokens

    def decode(self, batch: int) -> float:
        return self.decode_s + self.decode_more_s * max(0, batch - 1)


class _Inside:
    """One request inside. `last`: when its last token came; 0.0: it waits for its first."""

    __slots__ = ("arrived", "last", "prompt")

    def __init__(self, arrived: float, prompt: int) -> None:
        self.arrived, self.prompt = arrived, prompt
        self.last = 0.0


class RoseAdmission(BudgetDecider):
    """The admission. Its tick is every event of the traffic, and the moment at which the least slack is used up."""

    def __init__(self, targets: LatencyTargets, limits: StepLimits, setting: RoseSetting, tables: RoseTables) -> None:
        self._limits, self._tables = limits, tables
        self._ttft, self._tpot = setting.held * targets.ttft_s, setting.held * targets.tpot_s
        self._inside: dict[str, _Inside] = {}

    def arrived(self, now: float, request: str, prompt_tokens: int, *, streamed: bool = True) -> None:
        self._inside[request] = _Inside(now, prompt_tokens)

    def produced(self, now: float, request: str, tokens: int) -> None:
        if one := self._inside.get(request):
            one.last = now

    def ended(self, now: float, request: str, ok: bool) -> None:
        self._inside.pop(request, None)

    def observed(self, now: float, inside: int, waiting: int) -> None: ...

    def stepped(self, now: float, tokens: int, seconds: float) -> None: ...

    def decide(self, now: float) -> BudgetDecision:
        limits = self._limits
        if not self._inside:
            budget = Budget(limits.tokens, limits.sequences, now + GRANT_S)
            return BudgetDecision(budget, "idle", NOTHING_INSIDE, now + GRANT_S / 2)
        decode = self._tables.decode(sum(one.last > 0 for one in self._inside.values()))
        until = min(self._slack_ends(one, decode) for one in self._inside.values())
        if until <= now:
            return BudgetDecision(Budget(), "reclaimed", 0.0, now + GRANT_S / 2)
        budget = Budget(limits.tokens, limits.sequences, min(until, now + GRANT_S))
        return BudgetDecision(budget, "shared", until - now, min(until, now + GRANT_S / 2))

    def hold_s(self, now: float, stepping_since: float | None) -> float:
        return 0.0

    def learnt(self, now: float) -> LearntCosts:
        return LearntCosts(forecast=Forecast(share=1.0, spell_s=3600.0))

    def pays(self, now: float, wake_s: float) -> bool:
        return True

    def _slack_ends(self, one: _Inside, decode: float) -> float:
        if not one.last:
            return one.arrived + self._ttft - self._tables.prefill(one.prompt)
        return one.last + self._tpot - decode


class RoseMemory(MemoryBudget):
    """The KV policy. The first RL step begins with the first report of tokens, or as soon as it is over."""

    def __init__(
        self, setting: RoseSetting, *, limit_mib: int = 0, serving_kv_mib: int = 0, bytes_per_token: int = 0
    ) -> None:
        super().__init__(limit_mib=limit_mib, serving_kv_mib=serving_kv_mib, bytes_per_token=bytes_per_token)
        self._token_bytes, self._setting = bytes_per_token, setting
        self._watermark = setting.watermark * setting.headroom * self.limit
        self._began = 0.0
        self._cut = False
        self._kv: dict[str, int] = {}

    def tokens_inside(self, now: float, tokens: int) -> None:
        used = tokens * self._token_bytes
        self.serving_bytes = min(used, self._pool or used)
        if now - self._began >= self._setting.step_s:  # the next RL step
            self._began, self._cut = now, False
        self._cut |= self.serving_bytes > self._watermark

    def usage(self, now: float, share: float) -> None: ...

    def joined(self, worker_id: str, hello: Hello) -> None:
        self._kv[worker_id] = hello.kv_bytes

    def left(self, worker_id: str) -> None:
        self._kv.pop(worker_id, None)

    def reported(self, now: float, worker_id: str, report: BorrowerReport) -> None: ...

    def allowed(self, now: float, worker_id: str, *, idle_s: float) -> AllowedMemory:
        self.tokens_inside(now, self.serving_bytes // max(1, self._token_bytes))
        budget = min(self._kv.get(worker_id, 0), int((1 - self._setting.headroom) * self.limit))
        phase = CUT if self._cut else NORMAL
        return AllowedMemory(budget // 2 if self._cut else budget, phase, Residency.AWAKE)
