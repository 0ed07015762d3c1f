"""Measures Ebbtide beside rivals and former versions."""

import os

# Where gRPC is busy, its handlers of forks crash one in five children of a uvloop program before they exec. gRPC reads
# this as it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
