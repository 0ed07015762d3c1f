"""Outcomes of simulations that nobody simulated: each figure of theirs can be worked out by hand."""

from ebbtide.simulator.outcome import Outcome, PoolOutcome, Span, StepOutcome, TokenCounts


def step(number: int, opened: float, trained: float, *, run: str = "math", tokens: int = 1000) -> StepOutcome:
    return StepOutcome(
        run=run, step=number, opened_s=opened, generated_s=trained - 2.0, trained_s=trained, rollouts=8, tokens=tokens,
        tail_s=1.5,
    )  # fmt: skip


def outcome(seed: int = 0, *, scenario: str = "six spot machines", slower: float = 1.0) -> Outcome:
    """Two steps in an hour: of 10 and of 20 seconds, `slower` times as long."""
    first, second = 10.0 * slower, 30.0 * slower
    return Outcome(
        scenario=scenario,
        seed=seed,
        simulated_s=3600.0,
        steps=[step(0, 0.0, first), step(1, first, second)],
        pools=[
            PoolOutcome(pool="spot", machine_s=7200.0, busy_s=3600.0, booting_s=360.0, cost=8.0, losses=2, drains=1),
            PoolOutcome(pool="trainer", machine_s=3600.0, busy_s=900.0, cost=2.0),
            PoolOutcome(pool="absent", machine_s=0.0, busy_s=0.0),
        ],
        tokens=TokenCounts(generated=2200, kept=2000, lost=100, twice=110, moved=300, read=500, reread=50),
        moves=3,
        resumes=4,
        installs=5,
        weight_bytes=10**9,
        spans=[
            Span(machine="spot-1", pool="spot", state="booting", begin_s=0.0, end_s=60.0),
            Span(machine="spot-1", pool="spot", state="generating", begin_s=60.0, end_s=3000.0, run="math"),
            Span(machine="spot-1", pool="spot", state="lost", begin_s=3000.0, end_s=3600.0),
            Span(machine="spot-2", pool="spot", state="generating", begin_s=0.0, end_s=3600.0, run="math"),
            Span(machine="trainer", pool="trainer", state="training", begin_s=8.0, end_s=10.0, run="math"),
        ],
        fleet=[(0.0, "spot", 2), (0.0, "trainer", 1), (3000.0, "spot", 1)],
    )


def empty_outcome(seed: int = 0, *, scenario: str = "nothing there") -> Outcome:
    """A fleet without a machine: no step, no token, no cost."""
    return Outcome(
        scenario=scenario, seed=seed, simulated_s=0.0, steps=[], pools=[], tokens=TokenCounts(), unfinished=64
    )
