"""Build hooks. One compiles `protos/` into `common/ebbtide/v1`, for wheels and for installs in place alike; wheels get
the example scenarios, too. The other one tells a release where its repository is, as the variables of GitHub's
workflows say: its pages, and what its README links. A build elsewhere has no addresses.
"""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

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


_RELATIVE = re.compile(r"\]\((?!https?://|#)([^)\s]+)\)")


class ReleaseMetadata(MetadataHookInterface):
    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        server, name = os.environ.get("GITHUB_SERVER_URL", ""), os.environ.get("GITHUB_REPOSITORY", "")
        if server and name:
            home, at = f"{server}/{name}", f"v{metadata['version']}"
            text = _RELATIVE.sub(rf"]({home}/blob/{at}/\1)", text)
            metadata["urls"] = {
                "Homepage": home,
                "Documentation": f"{home}/tree/{at}/docs",
                "Changelog": f"{home}/blob/{at}/CHANGELOG.md",
                "Issues": f"{home}/issues",
            }
        else:
            metadata["urls"] = {}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
