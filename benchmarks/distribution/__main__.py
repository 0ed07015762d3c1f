"""`python -m benchmarks.distribution [--quick]`: prints rows and figures as JSON."""

import argparse
import json
import sys

from benchmarks.distribution.level import run_level


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distribution")
    parser.add_argument("--quick", action="store_true", help="a smaller policy, fewer versions")
    options = parser.parse_args()
    found = run_level(quick=options.quick, tell=lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
