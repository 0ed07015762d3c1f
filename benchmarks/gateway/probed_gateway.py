"""A gateway whose loop is measured: `python -m benchmarks.gateway.probed_gateway` takes the gateway's flags.

It answers questions on the unix socket that EBBTIDE_PROBE names: see `loop_probe.answering_loop`.
"""

import uvloop

from benchmarks.scale.loop_probe import LoopProbe, answering_loop
from ebbtide.gateway.__main__ import main
from ebbtide.gateway.http.server import BoundedProtocol

if __name__ == "__main__":
    probe = LoopProbe()
    for name in ("connection_made", "connection_lost", "data_received"):
        setattr(BoundedProtocol, name, probe.watched(getattr(BoundedProtocol, name)))
    probe.watch_collector()
    uvloop.new_event_loop = answering_loop(probe)
    main()
