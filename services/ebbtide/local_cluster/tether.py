"""Makes a foreign program, such as Redis, die with its parent: `python -m ebbtide.local_cluster.tether PID COMMAND`.

The kernel keeps the tie across exec: it kills the program when process PID, which started it, dies.
"""

import os
import sys

from ebbtide.runtime import die_with_parent


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - there is no shell on purpose


if __name__ == "__main__":
    main()
