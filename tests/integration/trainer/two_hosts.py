"""Starts a trainer's two ranks, each as on a host of its own, and ends them together.

`two_hosts.py FOLDER FOLDER ebbtide.trainer FLAGS...`; the folders are those of the hosts' guards.
"""

import os
import signal
import subprocess
import sys
import time
from types import FrameType

from ebbtide.free_ports import free_port

#: From the end of one rank to that of the other, which notices by itself.
GRACE_S = 15.0


def main() -> int:
    folders, (module, *flags) = sys.argv[1:3], sys.argv[3:]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for number, folder in enumerate(folders):
        place = {"WORLD_SIZE": "2", "RANK": str(number), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        lending = ["--generate", "--grant-dir", folder, "--die-with-parent", str(os.getpid())]
        command = [sys.executable, "-m", module, *flags, *lending]
        ranks.append(subprocess.Popen(command, env=os.environ | meeting | place))

    def end(number: int, _frame: FrameType | None) -> None:
        ranks[0].send_signal(number)

    signal.signal(signal.SIGTERM, end)
    while all(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
    end_at = time.monotonic() + GRACE_S
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < end_at:
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
