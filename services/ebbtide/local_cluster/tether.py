"""`python -m ebbtide.local_cluster.tether PARENT COMMAND ...`: becomes a program without `--die-with-parent`, such as
Redis.

The kernel keeps the tie across exec: the program is killed when process PARENT, which started it, dies.
"""

import os
import sys

from ebbtide.runtime import die_with_parent


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - there is no shell on purpose


if __name__ == "__main__":
    main()
