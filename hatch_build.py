"""Build hook: compiles `protos/` into `common/ebbtide/v1`, for wheels and for installs in place alike. Wheels get the
example scenarios, too.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")


class ProtoHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        from grpc_tools import protoc

        root = Path(self.root)
        out = str(root / "common")
        # Beside the Python that builds, or in the environment that pip made for this build alone.
        folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        sources = [str(path) for path in sorted((root / "protos").rglob("*.proto"))]
        status = protoc.main(
            ["protoc", f"-I{root / 'protos'}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
            + [f"--plugin={name}={shutil.which(name, path=folders)}" for name in _PLUGINS]
            + [f"--{kind}={out}" for kind in ("python_out", "grpc_python_out", "mypy_out")]
            + [f"--mypy_grpc_out=only_async:{out}"]
            + sources
        )
        if status:
            raise RuntimeError(f"protoc ended with status {status}")
        build_data["artifacts"].append("common/ebbtide/v1/*_pb2*")
        if version == "standard":  # an install in place finds them where they are
            build_data["force_include"]["examples/scenarios"] = "ebbtide/simulator/scenario/examples"
