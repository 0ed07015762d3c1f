"""Has the trainer's own program make the base model of a local cluster, or finds the one made before."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ebbtide.local_cluster.local_cluster import LocalCluster
from ebbtide.types.run import RunSpec, to_mapping

_MODULE = "ebbtide.trainer.base_model"


async def base_model(cluster: LocalCluster, spec: RunSpec, cache: Path, tell: Callable[[str], None]) -> Path:
    """Returns the checkpoint for the spec's environment and seed; `tell` hears the progress. Raises `LaunchFailed`."""
    spec_file, log = cluster.directory / "base-model.json", cluster.log("base-model")
    spec_file.write_text(json.dumps(to_mapping(spec)))
    said: dict[str, Any] = {}

    def watch() -> None:
        said.update(_last(log))
        if "step" in said:
            tell(f"step {said['step']}: loss {said['loss']:.2f}, accuracy {said['accuracy']:.2f}")

    arguments = ("--spec", str(spec_file), "--directory", str(cache), "--json")
    await cluster.run_once("base-model", _MODULE, *arguments, watch=watch)
    return Path(said["path"])


def _last(log: Path) -> dict[str, Any]:
    """Returns the last line of JSON in the program's log."""
    for line in reversed(log.read_text(errors="replace").split("\n")[:-1]):
        if line.startswith("{"):
            said: dict[str, Any] = json.loads(line)
            return said
    return {}
