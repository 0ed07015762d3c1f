"""Reads rows by `datasets` and compares expressions by math-verify, where both are installed, without any network."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

HOME = Path(tempfile.mkdtemp())
os.environ |= {"HF_HOME": str(HOME), "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

from ebbtide.environments.dataset import DatasetSource  # noqa: E402 - the libraries read the variables when imported
from ebbtide.environments.rewards import load_reward  # noqa: E402
from ebbtide.errors import InvalidRequest  # noqa: E402

_COMMIT = "a" * 40
_CARD = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""
#: Response and answer.
_EXPRESSIONS = [
    (r"so $\frac{2}{4}$", r"\frac{1}{2}"),
    (r"It is \boxed{0.5}.", "1/2"),
    ("It is 72", "Thus #### 72"),
    (r"\boxed{\{1, 2\}}", r"\{2, 1\}"),
    ("It is 73.", "72"),
    ("I do not know.", "72"),
]


def from_parquet() -> list[Any]:
    from pyarrow import parquet, table

    rows = table({"question": [f"q{n}" for n in range(9)], "label": list(range(9))})
    parquet.write_table(rows, HOME / "train.parquet")
    parquet.write_table(rows.slice(7, 1), HOME / "test.parquet")
    splits = {"train": "train.parquet", "eval": "test.parquet"}
    source = DatasetSource({"data": str(HOME), "splits": splits, "prompt": "{question}", "answer": "label"}, 0)
    return [source.make("eval", 0).answer, int(source.make("eval", 0).reset()[0].content.removeprefix("q"))]


def from_hub() -> list[Any]:
    """What `hf download` leaves behind."""
    folder = HOME / "hub" / "datasets--owner--words"
    snapshot = folder / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(_COMMIT)
    (snapshot / "README.md").write_text(_CARD)
    for name in ("train", "test"):
        row = {"prompt": f"{name} 7", "answer": "seven"}
        (snapshot / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    source = DatasetSource({"data": "owner/words", "splits": {"train": "train", "eval": "test"}}, 0)
    episode = source.make("eval", 0)
    return [episode.reset()[0].content, episode.answer]


def refused(data: str) -> InvalidRequest:
    try:
        DatasetSource({"data": data}, 0)
    except InvalidRequest as error:
        return error
    raise AssertionError


def from_a_card_that_names_files_of_the_host() -> list[str]:
    """Absolute, and relative ones above the data set's folder."""
    secret = HOME / "secret.jsonl"
    secret.write_text(json.dumps({"prompt": "secret", "answer": "secret"}) + "\n")
    folder = HOME / "hub" / "datasets--owner--evil"
    snapshot = folder / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(_COMMIT)
    found = []
    for path in (str(secret), "../../../../secret.jsonl"):
        (snapshot / "README.md").write_text(_CARD.replace("train.jsonl", path).replace("test.jsonl", path))
        found.append(refused("owner/evil").text)
    return found


def main() -> None:
    verify = load_reward("math_verify", {})
    found = {
        "parquet": from_parquet(),
        "hub": from_hub(),
        "absent": refused("owner/absent").field,
        "remedy": "hf download --repo-type dataset owner/absent" in refused("owner/absent").text,
        "own": ["names a file that is not its own" in text for text in from_a_card_that_names_files_of_the_host()],
        "equal": [verify(response, answer, {}) for response, answer in _EXPRESSIONS],
    }
    print(json.dumps(found))  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
