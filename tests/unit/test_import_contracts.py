"""Who may import whom: import-linter's contracts (pyproject.toml), shown to bite, and rules that it cannot express."""

import ast
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("common", "services", "lab")
#: One violation for each contract: the module that is added, and its import.
PLANTED = {
    "Layers": ("common/ebbtide/types/planted.py", "import ebbtide.rpc.status_table"),
    "Inside the coordinator": (
        "services/ebbtide/coordinator/state/planted.py",
        "import ebbtide.coordinator.dispatch.dispatcher",
    ),
    "The coordinator's model": ("services/ebbtide/coordinator/state/planted_too.py", "import ebbtide.v1.fleet_pb2"),
    "Inside the worker": (
        "services/ebbtide/rollout_worker/engine/planted.py",
        "import ebbtide.rollout_worker.generation.outbox",
    ),
    "Inside the guard": (
        "services/ebbtide/serving_guard/governor/planted.py",
        "import ebbtide.serving_guard.proxy.proxy",
    ),
    "Inside the relay": ("services/ebbtide/weight_relay/library/planted.py", "import ebbtide.weight_relay.serving"),
    "Inside the gateway": (
        "services/ebbtide/gateway/sessions/planted.py",
        "import ebbtide.gateway.http.route",
    ),
    "Inside the trainer": ("services/ebbtide/trainer/ranks/planted.py", "import ebbtide.trainer.training"),
    "The views show": ("services/ebbtide/cli/views/planted.py", "import ebbtide.cli.commands.up"),
    "The product imports nothing of the lab": (
        "services/ebbtide/driver/planted.py",
        "import ebbtide.simulator.outcome",
    ),
    "The SDK installs light": ("common/ebbtide/client/planted.py", "import ebbtide.telemetry"),
    "Only the coordinator has a store": ("services/ebbtide/trainer/planted.py", "import ebbtide.store"),
    "The simulator needs no client": ("lab/ebbtide/simulator/planted.py", "import ebbtide.store.store"),
    "Only trainers, drivers, gateways": ("services/ebbtide/weight_relay/planted.py", "import ebbtide.client"),
    "The product does not run on": ("services/ebbtide/cli/planted_too.py", "import tests.support.waiting"),
    "Decisions and weights are pure": ("services/ebbtide/coordinator/rules/planted.py", "import time"),
    "redis belongs": ("services/ebbtide/coordinator/planted.py", "import redis.asyncio"),
    "grpc belongs": ("services/ebbtide/coordinator/planted_too.py", "from grpc import aio"),
    "vllm belongs": ("services/ebbtide/rollout_worker/planted.py", "import vllm"),
    "torch belongs": ("services/ebbtide/cli/planted.py", "def late():\n    import torch"),
}
#: Runs import-linter over the tree in the working directory and no other, wherever else ebbtide is installed.
LINT = f"""
import os, sys
from importlinter.cli import lint_imports
sys.path[:] = [*{SOURCES!r}, *(path for path in sys.path if not os.path.isdir(os.path.join(path, "ebbtide")))]
sys.exit(lint_imports(config_filename="pyproject.toml", no_cache=True))
"""


def lint(tree: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", LINT], cwd=tree, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def modules() -> Iterator[Path]:
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            if "_pb2" not in path.name:
                yield path


def test_the_tree_keeps_its_contracts() -> None:
    status, report = lint(ROOT)
    assert status == 0, report
    assert "0 broken" in report


def test_every_contract_notices_a_violation(tmp_path: Path) -> None:
    for source in SOURCES:
        shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, text in PLANTED.values():
        (tmp_path / path).write_text(text + "\n")
    status, report = lint(tmp_path)
    assert status == 1, report
    kept = [line for line in report.splitlines() if " KEPT" in line]
    assert not kept
    for name, (path, _) in PLANTED.items():
        assert any(line.startswith(name) and "BROKEN" in line for line in report.splitlines()), (name, report)
        assert ".".join(Path(path).with_suffix("").parts[1:]) in report


def test_only_who_starts_or_borrows_an_engine_knows_vllm() -> None:
    """What serves every engine imports nothing of vLLM's: its interface least of all."""
    worker = ROOT / "services/ebbtide/rollout_worker"
    knowing = {"service.py", "guard_link.py", "boot_loan.py"}
    for path in worker.rglob("*.py"):
        name = path.relative_to(worker).as_posix()
        imports = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
        if name not in knowing and not name.startswith("engine/vllm/"):
            assert not [node.module for node in imports if "engine.vllm" in (node.module or "")], name


def dangers(tree: ast.AST) -> Iterator[str]:
    """What runs code out of data: pickle and its kin, `torch.load`, `eval`, `exec`, numpy files with objects."""
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"import {name.name}" for name in names if name.name.split(".")[0] in forbidden)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in forbidden:
                yield f"from {module}"
            case ast.ImportFrom(module="torch", names=names):
                yield from (f"from torch import {name.name}" for name in names if name.name in {"load", "save"})
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                yield f"{name}()"
            case ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save" as name):
                yield f"torch.{name}"
            case ast.keyword(arg="allow_pickle" | "trust_remote_code" as name, value=value):
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield name


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "exec('1')",
        "f(allow_pickle=True)",
        "f(trust_remote_code=flag)",
    ],
)
def test_the_search_for_dangers_finds_them(source: str) -> None:
    assert list(dangers(ast.parse(source)))


#: Runs programs that a policy wrote, which is its purpose: a script in a process of its own, which nothing imports.
RUNNER = ROOT / "services" / "ebbtide" / "environments" / "program_runner.py"


def test_nothing_runs_code_out_of_data() -> None:
    found = {str(path.relative_to(ROOT)): list(dangers(ast.parse(path.read_text()))) for path in modules()}
    assert len(found) > 20
    assert {path: what for path, what in found.items() if what} == {str(RUNNER.relative_to(ROOT)): ["exec()"] * 3}


def test_what_runs_the_programs_of_a_policy_is_imported_by_nothing() -> None:
    assert all(f"environments.{RUNNER.stem}" not in path.read_text() for path in modules())
    assert f"environments import {RUNNER.stem}" not in "".join(path.read_text() for path in modules())


def imported_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_sdk_imports_neither_torch_nor_vllm_nor_redis() -> None:
    loaded = imported_by("from ebbtide.client import Client")
    assert "grpc" in loaded
    assert loaded.isdisjoint({"torch", "vllm", "redis", "transformers", "uvloop", "structlog", "prometheus_client"})


SERVICES_ROOT = ROOT / "services"
MAINS = [
    ".".join(path.parent.relative_to(SERVICES_ROOT).parts)
    for path in sorted(SERVICES_ROOT.rglob("__main__.py"))
    if path.parent.name != "cli"
]


@pytest.mark.parametrize("name", MAINS)
def test_a_service_answers_help_without_heavy_imports(name: str) -> None:
    for module in (f"{name}.__main__", f"{name}.settings"):
        if importlib.util.find_spec(module):
            loaded = imported_by(f"import {module}")
            assert loaded.isdisjoint({"torch", "vllm", "transformers", "safetensors", "matplotlib", "numpy"}), module
