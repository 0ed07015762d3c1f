"""Records what one simulated run of a scenario came to: steps, tokens, cost, and a timeline."""

from msgspec import Struct


class StepOutcome(Struct, frozen=True, kw_only=True):
    """One training step. Times in seconds since the scenario's begin."""

    run: str
    step: int
    opened_s: float  # its first rollout could be submitted
    generated_s: float  # its last rollout ended
    trained_s: float  # the optimiser's step was done
    rollouts: int
    tokens: int  # of its responses
    tail_s: float  # from the end of nine tenths of its rollouts to the end of the last one


class PoolOutcome(Struct, frozen=True, kw_only=True):
    """One pool of like workers, or one run's trainer. Seconds are sums over its machines."""

    pool: str
    machine_s: float  # machines were there, booting ones too
    busy_s: float  # an engine generated or read prompts, a trainer trained
    booting_s: float = 0.0
    installing_s: float = 0.0
    held_s: float = 0.0  # the host of a borrowed worker did not lend it
    cost: float = 0.0  # dollars
    losses: int = 0
    drains: int = 0

    @property
    def idle_share(self) -> float:
        """Share of the machines' time in which they neither worked, booted, installed nor served users."""
        idle = self.machine_s - self.busy_s - self.booting_s - self.installing_s - self.held_s
        return max(0.0, idle / self.machine_s) if self.machine_s else 0.0


class TokenCounts(Struct, kw_only=True):
    generated: int = 0  # all that engines sampled
    kept: int = 0  # of responses that ended
    lost: int = 0  # sampled, and gone before they were stored
    twice: int = 0  # sampled again because they were lost
    moved: int = 0  # already made when a rollout went on at another worker
    read: int = 0  # prompts and partial responses that engines prefilled
    reread: int = 0  # of those, what an engine had read before
    dropped: int = 0  # of responses that were abandoned on purpose


class Span(Struct, frozen=True, kw_only=True):
    """What a machine did for a while, for the timeline."""

    machine: str
    pool: str
    state: str  # "booting", "installing", "generating", "training", "idle", "held", "lost"
    begin_s: float
    end_s: float
    run: str = ""


class Outcome(Struct, kw_only=True):
    """What one simulated run of a scenario with one seed came to."""

    scenario: str
    seed: int
    simulated_s: float
    steps: list[StepOutcome]
    pools: list[PoolOutcome]
    tokens: TokenCounts
    moves: int = 0
    resumes: int = 0  # attempts beyond a rollout's first
    preemptions: int = 0  # by engines, for want of KV memory
    installs: int = 0
    weight_bytes: int = 0  # of versions, over all links
    unfinished: int = 0  # rollouts that had not ended when the scenario's time was up
    spans: list[Span] = []
    fleet: list[tuple[float, str, int]] = []  # (second, pool, machines that are there from then on)


class SimulationProgress(Struct, frozen=True, kw_only=True):
    """How far a simulation has come, for people who wait for it."""

    at_s: float  # simulated seconds since the scenario's begin
    until_s: float = 0.0  # its end; 0: it ends with its last step
    steps: int = 0  # trained so far, of all runs
    of_steps: int = 0  # 0: it ends with its time

    @property
    def share(self) -> float:
        """Of the way, from 0 to 1; the nearer of both ends counts."""
        shares = [done / whole for done, whole in ((self.at_s, self.until_s), (self.steps, self.of_steps)) if whole]
        return min(1.0, max(shares, default=0.0))
