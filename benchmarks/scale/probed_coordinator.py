"""A coordinator whose loop is measured: `python -m benchmarks.scale.probed_coordinator` takes the coordinator's flags.

It answers questions on the unix socket that EBBTIDE_PROBE names: see `loop_probe.answering_loop`. The coordinator's
code is that of the checkout which comes first on PYTHONPATH.
"""

from typing import Final

import uvloop

from benchmarks.scale.loop_probe import LoopProbe, answering_loop
from ebbtide.coordinator.__main__ import main
from ebbtide.coordinator.dispatch.rebalancer import Rebalancer

#: Methods that balance the fleet: together they may take a tenth of a core.
_BALANCING: Final = ("due", "_observe_all", "_begin_round", "decide")

if __name__ == "__main__":
    probe = LoopProbe()
    for _name in _BALANCING:
        if function := getattr(Rebalancer, _name, None):
            setattr(Rebalancer, _name, probe.timed("balancing", function))
    probe.watch_collector()
    uvloop.new_event_loop = answering_loop(probe)
    main()
