"""Level (b) alone: python -m benchmarks.control_plane --workers 100 --rollouts 64 --seconds 30 --rate 200000"""

import argparse
import json

from benchmarks.control_plane.level import Load, run_level


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--rollouts", type=int, default=64, help="of each worker")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the steady part")
    parser.add_argument("--rate", type=float, default=200_000.0, help="tokens/s of all together")
    parser.add_argument("--losses", type=int, default=12, help="workers lost of each kind; 0: none")
    parser.add_argument("--probes", type=int, default=8, help="rates tried for the highest; 0: none")
    parser.add_argument("--probe-s", type=float, default=5.0, help="seconds at each rate of the search")
    figures = run_level(tell=lambda line: print(line, flush=True), load=Load(**vars(parser.parse_args())))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
