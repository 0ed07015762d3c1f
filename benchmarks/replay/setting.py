"""What the replay takes for given, and the policies that it compares."""

from math import inf
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.replay.traces import CAP_TOKENS
from ebbtide.scheduling.dispatch.move_costs import COSTS, MoveCosts


class Setting(Struct, frozen=True, kw_only=True):
    """The engine and the step, alike for all policies. Times in seconds, rates in tokens/s.

    A rollout makes `rate` until `plateau` of them run in an engine; beyond, all share what those make. With
    `context_tokens` > 0 contexts cost too: at a mean context of that many tokens the plateau is half of `plateau`.
    `spread`: workers are up to so much faster or slower. `boot_s` and `pull_s`: from the machine's start to its first
    token. A loss is noticed after `detection_s`; what was flushed last, `flush_s` or `flush_tokens` ago at most, is
    kept. A rollout that goes on elsewhere is on its way for `handover_s` and then holds up its new engine for a
    prefill of all it has. That a rollout has started is known `start_s` after it was given. `gap_s`: between
    steps. First starts cost no prefill: they would in every policy alike. `cap_tokens`: the longest response, also
    after lengths were stretched.
    """

    rate: float = 30.0
    plateau: int = 32
    slots: int = 64
    context_tokens: float = 0.0
    spread: float = 0.0
    boot_s: float = 60.0
    pull_s: float = 15.0
    detection_s: float = 3.0
    handover_s: float = 0.5
    start_s: float = 0.05
    flush_s: float = 0.25
    flush_tokens: int = 32
    prefill_tokens_per_s: float = 10_000.0
    prompt_tokens: int = 512
    gap_s: float = 0.0
    rollouts: int = 1_024
    cap_tokens: int = CAP_TOKENS
    tick_s: float = 2.0
    seed: int = 0


def costless(setting: Setting) -> Setting:
    """The same, where starts and losses are noticed at once, and neither losses nor moves cost a thing."""
    return replace(setting, detection_s=0.0, handover_s=0.0, start_s=0.0, flush_tokens=0, prefill_tokens_per_s=inf)


class Policy(Struct, frozen=True, kw_only=True):
    """`keeps`: what a lost worker had stored goes on elsewhere; else it is generated again from zero. `delays`: what
    exceeds the slots waits in line; else all is given away at once. `knows`: it sees every length and puts the longest
    first into line, and moves, resumes and losses cost it nothing. `spares`: it fills an engine no further than its
    plateau. `balances` with `costs`; `unstarted`, `learnt` and `weighted`: see `scheduling.balance` and
    `scheduling.throughput`.
    """

    name: str
    keeps: bool = True
    knows: bool = False
    spares: bool = False
    delays: bool = True
    balances: bool = True
    unstarted: bool = True
    learnt: bool = True
    weighted: bool = True
    costs: MoveCosts = COSTS


_NO_SURPLUS: Final = MoveCosts(advantage=inf)
_FREE_MOVES: Final = MoveCosts(prefill_tokens_per_s=inf, handover_s=0.0, margin=0.0, advantage=1.0, least_stay_s=0.0)
#: Also free, but made only where they change something: to and fro between equals is nothing but work for us.
_USEFUL_MOVES: Final = replace(_FREE_MOVES, advantage=1.001)

RESTART: Final = Policy(name="restart", keeps=False, delays=False, balances=False)
MIGRATE: Final = Policy(name="migrate", delays=False, balances=False)
BALANCE: Final = Policy(name="balance")
#: The clairvoyant longest-first schedule on the same fleet, with the same engines, slots and rules.
ORACLE: Final = Policy(name="oracle: longest first", knows=True, costs=_USEFUL_MOVES)
#: The same with one freedom more: it leaves slots empty, so that the shorter ones do not slow down the longest.
PLATEAU_FIRST: Final = Policy(name="oracle, up to the plateau", knows=True, spares=True, costs=_USEFUL_MOVES)
POLICIES: Final = (RESTART, MIGRATE, BALANCE, ORACLE, PLATEAU_FIRST)
ABLATION: Final = (
    Policy(name="delayed dispatch only", balances=False),
    Policy(name="without delayed dispatch", delays=False),
    Policy(name="without delayed dispatch and rule i", delays=False, unstarted=False),
    Policy(name="without rule ii", costs=_NO_SURPLUS),
    Policy(name="without delayed dispatch and rule ii", delays=False, costs=_NO_SURPLUS),
    Policy(name="without a learnt plateau", learnt=False),
    Policy(name="without weighing contexts", weighted=False),
    Policy(name="without gain above cost", costs=_FREE_MOVES),
)
