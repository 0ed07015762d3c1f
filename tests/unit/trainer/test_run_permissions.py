"""What a run names is refused before anything of it is loaded, unless the settings allow it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reasoning_gym.factory import DATASETS

from ebbtide.cli.submit_preflight import check_deeply
from ebbtide.driver.service import drive
from ebbtide.driver.settings import DriverSettings
from ebbtide.environments import EVALUATING, needs_isolation
from ebbtide.errors import InvalidRequest
from ebbtide.run_settings import AllowedEnvironments, WorkSettings, check_permitted
from ebbtide.settings import read
from ebbtide.trainer.service import train
from ebbtide.trainer.settings import TrainerSettings
from ebbtide.types.run import RunSpec

#: `subprocess:Popen` called with these params and a seed runs a program.
POPEN = {"name": "subprocess:Popen", "params": {"touch": "it-ran"}}


def make_spec(model: Path | str = "model", **changes: Any) -> RunSpec:
    base = {"name": "run", "model": str(model), "environment": {"name": "number_guessing"}}
    return msgspec.convert(base | changes, RunSpec)


def field_refused(spec: RunSpec, settings: WorkSettings) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check_permitted(spec, settings)
    return caught.value.field


async def test_a_run_that_names_any_callable_is_refused_by_driver_and_trainer_before_it_is_called(
    tiny_model: Path, make_cluster: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_: pytest.fail("it was called"))
    cluster = make_cluster(make_spec(tiny_model, environment=POPEN), lambda request: None)
    client, names_it = make_client(cluster), r"environment\.name: 'subprocess:Popen'.*environments\.allowed"
    with pytest.raises(InvalidRequest, match=names_it):
        await drive(client, cluster.lease("driver"), DriverSettings())
    with pytest.raises(InvalidRequest, match=names_it):
        await train(client, cluster.lease("trainer"), TrainerSettings())


async def test_a_trainer_that_is_not_listed_is_not_imported(
    tiny_model: Path, make_cluster: Any, make_client: Any
) -> None:
    sys.modules.pop("this", None)
    cluster = make_cluster(make_spec(tiny_model, trainer={"name": "this:train"}), lambda request: None)
    with pytest.raises(InvalidRequest, match=r"trainer\.name: .*allowed_trainers"):
        await train(make_client(cluster), cluster.lease("trainer"), TrainerSettings())
    assert "this" not in sys.modules


def test_submit_refuses_what_a_trainer_here_would(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="EBBTIDE_ENVIRONMENTS_ALLOWED"):
        check_deeply(make_spec(tiny_model, environment=POPEN))
    monkeypatch.setenv("EBBTIDE_MODEL_ROOTS", str(tiny_model / "elsewhere"))
    with pytest.raises(InvalidRequest, match=r"model: .*EBBTIDE_MODEL_ROOTS"):
        check_deeply(make_spec(tiny_model))


def test_built_in_environments_are_allowed_and_a_list_may_hold_patterns() -> None:
    own = make_spec(environment={"name": "sums:Sums"})
    check_permitted(make_spec(), WorkSettings())
    assert field_refused(own, WorkSettings()) == "environment.name"
    check_permitted(own, WorkSettings(environments=AllowedEnvironments(allowed=("sums:*",))))
    for name in ("EBBTIDE_ENVIRONMENTS_ALLOWED", "EBBTIDE_DRIVER_ENVIRONMENTS_ALLOWED"):
        found = read(DriverSettings, prog="ebbtide serve driver", argv=[], environ={name: "sums:Sums, more:*"})
        assert found.environments.allowed == ("sums:Sums", "more:*")


def test_models_and_outputs_lie_below_their_roots_wherever_links_lead(tmp_path: Path) -> None:
    for name in ("models/mine", "outputs", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "models" / "link").symlink_to(tmp_path / "elsewhere")
    roots = WorkSettings(model_roots=(str(tmp_path / "models"),), output_roots=(str(tmp_path / "outputs"),))
    inside = {"model": str(tmp_path / "models" / "mine"), "output": str(tmp_path / "outputs" / "new")}
    check_permitted(make_spec(**inside), roots)
    for model in ("models/link", "models/../elsewhere", "models-of-others"):
        assert field_refused(make_spec(**{**inside, "model": str(tmp_path / model)}), roots) == "model"
    for output in (str(tmp_path), "/etc", "runs", "a\0b"):
        assert field_refused(make_spec(**{**inside, "output": output}), roots) == "output"
    assert field_refused(make_spec(output="/etc"), WorkSettings()) == "output"  # by default, the working directory


def test_rows_lie_below_their_roots_and_a_reward_function_has_to_be_listed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link.jsonl").symlink_to("/etc/passwd")
    roots = WorkSettings(data_roots=(str(tmp_path / "data"),), output_roots=("/",))

    def run(**params: Any) -> RunSpec:
        return make_spec(environment={"name": "dataset", "params": {"data": str(tmp_path / "data"), **params}})

    inside = {"splits": {"train": "a.jsonl", "eval": "b.parquet"}}
    check_permitted(run(**inside), roots)
    check_permitted(run(data="owner/name"), roots)  # of the Hub
    few = msgspec.structs.replace(roots, data_sets=("owner/public-*",))
    check_permitted(run(data="owner/public-sums"), few)
    assert field_refused(run(data="owner/name"), few) == "environment.params.data"
    for params in ({"data": "/etc/a.jsonl"}, {"data": str(tmp_path / "data" / "link.jsonl")}, {"data": "a.jsonl"}):
        assert field_refused(run(**params), roots) == "environment.params.data"
    for other in ("../a.jsonl", "/etc/a.jsonl"):
        outside = {"splits": {"train": "a.jsonl", "eval": other}}
        assert field_refused(run(**outside), roots) == "environment.params.data"
    assert field_refused(run(data="/data/a.jsonl"), WorkSettings()) == "environment.params.data"  # by default
    assert field_refused(run(**inside, reward="subprocess:Popen"), roots) == "environment.params.reward"
    listed = msgspec.structs.replace(roots, environments=AllowedEnvironments(allowed=("dataset", "mine:*")))
    check_permitted(run(**inside, reward="mine:score"), listed)


def test_data_sets_whose_verifiers_evaluate_answers_count_as_code_of_others() -> None:
    """Python evaluates the policy's answer there; whoever submits a run chooses the policy."""
    evaluates = re.compile(r"(?:\beval|\bexec|\bparse_expr|\bsympify)\((?:answer|user_)")
    found = {name for name, (kind, _) in DATASETS.items() if evaluates.search(Path(source_of(kind)).read_text())}
    assert found | {"composite"} == EVALUATING
    assert needs_isolation("reasoning_gym", {"dataset": "countdown"})
    for dataset in ("spell_backward", ["countdown"], None):
        assert not needs_isolation("reasoning_gym", {"dataset": dataset})


def source_of(kind: type) -> str:
    return str(sys.modules[kind.__module__].__file__)
