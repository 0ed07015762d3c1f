"""Paths that programs of the former release name still work, and say where the module is now."""

import importlib
import subprocess
import sys

import pytest

FORMER = {
    "ebbtide.client.distributed": "ebbtide.client.publisher.torch_exchange",
    "ebbtide.cli.health": "ebbtide.cli.commands.health_command",
    "ebbtide.rollout_worker.engine.plugin": "ebbtide.rollout_worker.engine.vllm.vllm_plugin",
    "ebbtide.trainer.base_model_command": "ebbtide.trainer.base_model.__main__",
    "ebbtide.trainer.driver.__main__": "ebbtide.driver.__main__",
    "ebbtide.trainer.environments": "ebbtide.environments",
    "ebbtide.trainer.environments.splits": "ebbtide.environments.problem_splits",
}


@pytest.mark.parametrize(("former", "path"), FORMER.items())
def test_a_former_path_works_and_names_the_present_one(former: str, path: str) -> None:
    sys.modules.pop(former, None)
    with pytest.warns(DeprecationWarning, match=f"is now {path.removesuffix('.__main__')};"):
        module = importlib.import_module(former)
    present = importlib.import_module(path)
    names = getattr(module, "__all__", ["main"])
    assert all(getattr(module, name) is getattr(present, name) for name in names)


@pytest.mark.parametrize(
    "former", ["ebbtide.cli.health", "ebbtide.trainer.base_model_command", "ebbtide.trainer.driver"]
)
def test_a_program_that_is_run_by_its_former_path_says_so(former: str) -> None:
    done = subprocess.run([sys.executable, "-m", former, "--help"], capture_output=True, text=True, check=True)
    assert f"DeprecationWarning: {former} is now " in done.stderr
