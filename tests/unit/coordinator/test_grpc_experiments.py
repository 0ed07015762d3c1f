"""gRPC takes its experiments from the environment as it is imported."""

import os
import subprocess
import sys

#: Prints the experiments that are set when gRPC is imported for the first time.
_PROGRAM = """
import os, sys
from importlib.abc import MetaPathFinder

class Watch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            print("experiments:", os.environ.get("GRPC_EXPERIMENTS", ""))

sys.meta_path.insert(0, Watch())
from ebbtide.coordinator.__main__ import main
main(["--help"])
"""


def experiments(**environment: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"} | environment
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return [line for line in done.stdout.splitlines() if line.startswith("experiments:")]


def test_the_coordinator_chooses_its_experiments_before_grpc_is_imported() -> None:
    assert experiments() == ["experiments: -event_engine_listener"]


def test_an_operator_may_choose_others() -> None:
    assert experiments(GRPC_EXPERIMENTS="-event_engine_dns") == ["experiments: -event_engine_dns"]
