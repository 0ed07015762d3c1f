"""Models by their names on the Hugging Face Hub: told apart from paths, fetched once, and pushed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.hub_models import is_hub_name, model_name, no_directory
from tests.fakes.hub import COMMIT, FakeHub, fake_hub

FILES = {"config.json": b"{}", "model.safetensors": b"weights", "README.md": b"#", "original/model.safetensors": b"x"}


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "org/a.b_c-1"])
def test_a_name_of_the_hub_gets_the_command_that_fetches_it(model: str) -> None:
    folder = f"models/{model.split('/')[1]}"
    assert is_hub_name(model)
    assert no_directory(model).endswith(f"hf download {model} --local-dir {folder}, then give {folder}")


@pytest.mark.parametrize("model", ["/nope", "nope", "./a/b", "../a", "a/b/c", "a/", "a/b c", ""])
def test_any_other_path_is_a_path(model: str) -> None:
    assert not is_hub_name(model)
    assert no_directory(model) == f"{model!r} is no directory; give the path of a local checkpoint"


def test_a_folder_that_is_there_is_no_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name("owner/tiny")


def test_a_snapshot_is_called_like_its_repository() -> None:
    assert model_name(f"/home/me/hub/models--owner--tiny-1/snapshots/{COMMIT}") == "tiny-1"
    assert model_name("owner/tiny-1") == model_name("/models/tiny-1") == "tiny-1"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        hub.repositories["owner/tiny"] = dict(FILES)
        yield hub


def said(code: str, home: Path, **variables: str) -> str:
    """What a new process prints: the library reads its variables when it is imported."""
    whole = (
        f"from pathlib import Path\nfrom ebbtide import hub_models\nfrom ebbtide.errors import InvalidRequest\n{code}"
    )
    given = {"PATH": "", "PYTHONPATH": ":".join(sys.path), "HF_HOME": str(home), "HOME": str(home), **variables}
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, env=given, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


FETCH = "folder = hub_models.model_folder('owner/tiny'); print(sorted(one.name for one in folder.iterdir()))"


def test_a_model_is_fetched_once_with_what_a_checkpoint_needs_and_then_found_without_a_network(
    hub: FakeHub, tmp_path: Path
) -> None:
    wanted = "['config.json', 'model.safetensors']\n"
    assert said("print(hub_models.cached_model('owner/tiny'))", tmp_path, HF_ENDPOINT=hub.url) == "None\n"
    assert said(FETCH, tmp_path, HF_ENDPOINT=hub.url) == wanted
    asked = len(hub.asked)
    assert said(FETCH, tmp_path, HF_ENDPOINT=hub.url) == wanted
    assert len(hub.asked) == asked
    assert said(FETCH, tmp_path, HF_HUB_OFFLINE="1") == wanted


def test_a_driver_fetches_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    fetch = FETCH.replace("model_folder", "tokenizer_folder")
    assert said(fetch, tmp_path, HF_ENDPOINT=hub.url) == "['config.json']\n"
    assert not any("safetensors" in asked for asked in hub.asked)
    assert said(FETCH, tmp_path, HF_ENDPOINT=hub.url) == "['config.json', 'model.safetensors']\n"


def test_a_rank_of_another_host_finds_rank_0s_commit_in_its_own_cache(hub: FakeHub, tmp_path: Path) -> None:
    other = tmp_path / "absent" / "models--owner--tiny" / "snapshots" / COMMIT
    find = f"print(hub_models.same_folder(Path({str(other)!r}), 'owner/tiny'))"
    found = Path(said(find, tmp_path / "own", HF_ENDPOINT=hub.url).strip())
    assert found.is_relative_to(tmp_path / "own")
    assert (found.name, sorted(one.name for one in found.iterdir())) == (COMMIT, ["config.json", "model.safetensors"])
    other.mkdir(parents=True)
    (other / "model.safetensors").touch()  # as on a shared disk
    assert said(find, tmp_path / "own", HF_HUB_OFFLINE="1") == f"{other}\n"


@pytest.mark.parametrize("there", [{}, {"model.safetensors.index.json": b'{"weight_map": {"w": "a.safetensors"}}'}])
def test_a_cache_with_the_tokenizer_alone_is_completed_where_there_is_a_network(
    hub: FakeHub, tmp_path: Path, there: dict[str, bytes]
) -> None:
    folder = tmp_path / "hub" / "models--owner--tiny"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    for name, content in {"config.json": b"{}", **there}.items():
        (snapshot / name).write_bytes(content)
    found = "print(sorted(one.name for one in hub_models.model_folder('owner/tiny').glob('*.safetensors')))"
    assert said("print(hub_models.cached_model('owner/tiny'))", tmp_path, HF_HUB_OFFLINE="1") == "None\n"
    assert said(found, tmp_path, HF_HUB_OFFLINE="1") == "[]\n"
    assert said(found, tmp_path, HF_ENDPOINT=hub.url) == "['model.safetensors']\n"


@pytest.mark.parametrize("variables", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": ""}])
def test_a_model_that_cannot_be_fetched_is_refused_with_the_remedy(
    hub: FakeHub, tmp_path: Path, variables: dict[str, str]
) -> None:
    code = """
try:
    hub_models.model_folder('owner/absent')
except InvalidRequest as error:
    print(error.field, error.text)
print(hub_models.is_on_hub('owner/absent'))
"""
    told = said(code, tmp_path, **{name: value or hub.url for name, value in variables.items()})
    assert told.startswith("model 'owner/absent' is no directory")
    assert "hf download owner/absent --local-dir models/absent" in told
    assert "HF_HOME" in told
    assert told.endswith("False\n")


def test_a_push_brings_weights_and_tokenizer_and_leaves_the_training_state_out(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "step-000010"
    (folder / "trainer").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "trainer/optimizer.safetensors"):
        (folder / name).write_text(name)
    hub.token = "hf_secret"
    push = f"print(hub_models.push_folder(Path({str(folder)!r}), 'me/new', private=True, message='Step 10'))"
    assert said(push, tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN=hub.token) == f"{hub.url}/me/new/commit/{COMMIT}\n"
    assert hub.repositories["me/new"].keys() == {"config.json", "model.safetensors", "tokenizer.json"}
    assert hub.repositories["me/new"]["config.json"] == b"config.json"
    assert hub.private["me/new"]


def test_a_push_without_the_right_token_is_refused_with_the_remedy(hub: FakeHub, tmp_path: Path) -> None:
    code = """
try:
    hub_models.push_folder(Path('.'), 'me/new', private=True, message='Step 10')
except InvalidRequest as error:
    print(error.field, error.text)
"""
    told = said(code, tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN="hf_wrong")
    assert told.startswith("repository 'me/new' could not be written")
    assert "HF_TOKEN" in told
    assert "hf_wrong" not in told
