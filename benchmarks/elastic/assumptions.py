"""Names what the simulated settings assume where papers state nothing, so that comparisons may vary each by itself."""

from typing import Final, NamedTuple

from benchmarks.simulator.published.rlboost_points import RLBoostPaper

#: Fitted to the paper's points by `benchmarks.simulator.published`.
UNSTATED: Final = {one.name: one.value for one in RLBoostPaper.unstated}


class Assumptions(NamedTuple):
    """Times in seconds. Factors are on what is fitted to RLBoost's points."""

    sigma: float = UNSTATED["sigma"]  # of the lengths' logarithms
    correlation: float = UNSTATED["correlation"]  # of lengths within a group
    mean: float = 1.0  # factor on the mean length
    training: float = 1.0  # factor on the time to train a token
    memory: float = 0.6  # share of a device's memory for weights and contexts; 32B gets 0.8 where this is 0.6
    boot_s: float = 60.0  # of an instance: PEARL (arXiv 2609.35158) measured 56 to 67 s
    switch_s: float = 0.0  # beside what a copy of the weights takes: PEARL measured 6 s on, 3 to 4 s off
    notice_s: float = 0.0  # before an instance is lost: the paper replays losses without
    sent: float = 1.0  # versions have so many times two bytes a parameter
    most: int = 6  # instances at once
    drawn: float = 1.0  # machines that a trace has on average after the draw, over `most`
    thinned_by: int = 0  # seed by which a trace's machines are drawn
    spot_price: float = 5.32  # two H100 for an hour; published
    # What RLBoost's paper gives no values for. Those of its public code stand here.
    eta: float = 3.0
    micro_batch: int = 16
    first_window_s: float = 150.0
    # How far two nodes train less than twice as fast as one. The paper's cost of crossing nodes is not published.
    two_nodes: float = 1.0

    def changed(self) -> dict[str, float]:
        """Those that are not the usual ones."""
        usual = Assumptions()._asdict()
        return {name: value for name, value in self._asdict().items() if value != usual[name]}


#: What is varied, one by one.
VARIED: Final = (
    Assumptions(sigma=0.4),
    Assumptions(sigma=0.9),
    Assumptions(correlation=0.5),
    Assumptions(mean=0.7),
    Assumptions(training=0.7),
    Assumptions(training=1.4),
    Assumptions(memory=0.8),
    Assumptions(boot_s=0.0),
    Assumptions(boot_s=180.0),
    Assumptions(switch_s=5.0),
    Assumptions(notice_s=30.0),
    Assumptions(sent=2.0),
    Assumptions(most=3),
    Assumptions(drawn=0.5),
    Assumptions(thinned_by=1),
    Assumptions(spot_price=10.64),
    Assumptions(eta=1.5),
    Assumptions(eta=6.0),
    Assumptions(micro_batch=64),
    Assumptions(first_window_s=300.0),
)
