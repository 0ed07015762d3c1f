"""`python -m benchmarks.real_kills [--quick] [--kills N] ...`: prints the figures as JSON; ends with 1 if a token was
lost, doubled or changed.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.real_kills.figures import EXACT
from benchmarks.real_kills.level import PROMPTS, run_level


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_kills")
    parser.add_argument("--quick", action="store_true", help="four kills, shorter responses")
    parser.add_argument("--kills", type=int, default=0, help="how many workers are killed")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="distinct ones")
    parser.add_argument("--length", type=int, default=0, help="tokens of a response")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="where logs stay; must be empty")
    options = vars(parser.parse_args())
    figures = run_level(**options, notify=lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(figures, indent=2))
    changed = figures["unequal_responses"] or figures["largest_logprob_gap"] > EXACT
    return int(bool(changed or figures["acknowledged_tokens_lost"] or figures["acknowledged_tokens_doubled"]))


if __name__ == "__main__":
    raise SystemExit(main())
