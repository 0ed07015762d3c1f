"""examples/reversed_words.toml on real engines: the policy learns from rows and a reward function, and a control whose
answers belong to other rows does not."""

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from ebbtide.client import Client
from ebbtide.client.client import read_spec
from ebbtide.local_cluster.local_cluster import ClusterShape, base_model, free_address, local_cluster
from ebbtide.types.run import RunSpec, RunStatus

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "examples" / "reversed_words.toml"
#: Some minutes on two cores, and the base model once.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example's module, which the driver's processes import by its name, too."""
    import importlib
    import os
    import sys

    folder = str(SPEC.parent)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")])))
    yield importlib.import_module("reversed_words")
    sys.modules.pop("reversed_words", None)


def spec_of(data: Path, seed: int) -> RunSpec:
    spec = read_spec(tomllib.loads(SPEC.read_text()))
    params = {**spec.environment.params, "data": str(data)}
    environment = msgspec.structs.replace(spec.environment, params=params)
    return msgspec.structs.replace(spec, environment=environment, seed=seed, output=str(data.parent / "output"))


async def accuracies(example: ModuleType, folder: Path, seed: int, *, shuffle: bool = False) -> tuple[float, float]:
    """The accuracy on the rows for evaluation before the first step and after the last."""
    example.write(folder / "words")
    example.write(folder / "shuffled", shuffle=True)
    plain, spec = spec_of(folder / "words", seed), spec_of(folder / ("shuffled" if shuffle else "words"), seed)
    async with local_cluster(folder / "cluster", print) as cluster:
        model = await base_model(cluster, plain, ROOT / ".cache" / "base-models", lambda _: None)
        spec = msgspec.structs.replace(spec, model=str(model))
        address, relay = free_address(), free_address()
        reward = str(spec.environment.params["reward"])
        await cluster.boot(ClusterShape(model=model, coordinator=address, relay=relay, environments=(reward,)))
        async with Client(address, relay, token=cluster.token_file.read_text()) as client:
            run = await client.submit(spec)
            events = [event async for event in client.watch(run.run_id)]
            ended = await client.run(run.run_id)
    assert ended.status is RunStatus.FINISHED, ended.message
    found = {event.key: event.values for event in events if event.kind == "evaluation"}
    last = str(spec.trainer.steps)
    assert found["0"]["problems"] == found[last]["problems"] == 500
    return found["0"]["accuracy"], found[last]["accuracy"]


def test_the_spec_is_short() -> None:
    assert len(SPEC.read_text().splitlines()) <= 25


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_rows_and_a_reward_function_teach_the_policy(
    example: ModuleType, tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    first, last = await accuracies(example, tmp_path, seed)
    record_property("accuracies", (first, last))
    assert last - first >= 0.3


async def test_with_answers_of_other_rows_it_learns_nothing(
    example: ModuleType, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    first, last = await accuracies(example, tmp_path, 0, shuffle=True)
    record_property("accuracies", (first, last))
    assert abs(last - first) < 0.1
