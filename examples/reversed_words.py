"""Rows for reversed_words.toml, and its reward function: `python reversed_words.py FOLDER [--shuffle]`.

No word of the rows for evaluation is in a row to train on. `--shuffle`: a control, whose answers belong to other rows.
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

_WORDS = 5
_SHORTEST, _LONGEST = 4, 7
_EVAL_ROWS = 500


def share_right(response: str, answer: str, _row: Mapping[str, Any]) -> dict[str, float]:
    """The share of words that came out right, and how many were right and asked, for the accuracy."""
    wanted = answer.split(" ")
    right = sum(given == word for given, word in zip(response.split(" "), wanted, strict=False))
    return {"reward": right / len(wanted), "right": float(right), "asked": float(len(wanted))}


def rows(words: Iterable[str]) -> list[dict[str, str]]:
    """Rows of five words each."""
    groups = zip(*[iter(words)] * _WORDS, strict=False)
    return [{"words": " ".join(group), "reversed": " ".join(word[::-1] for word in group)} for group in groups]


def write(folder: Path, *, shuffle: bool = False) -> None:
    """Writes `train.jsonl` and `eval.jsonl`; with `shuffle`, only the rows to train on have answers of others."""
    text = (files("reasoning_gym.data") / "words3to10.txt").read_text()
    fitting = {word for word in text.split() if word.isascii() and word.isalpha() and word.islower()}
    words = sorted(word for word in fitting if _SHORTEST <= len(word) <= _LONGEST)
    Random(0).shuffle(words)
    held_out = _EVAL_ROWS * _WORDS
    parts = {"eval": rows(words[:held_out]), "train": rows(words[held_out:])}
    if shuffle:
        answers = [row["reversed"] for row in parts["train"]]
        parts["train"] = [
            {**row, "reversed": answer} for row, answer in zip(parts["train"], answers[1:] + answers[:1], strict=True)
        ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shuffle", action="store_true")
    given = parser.parse_args()
    write(given.folder, shuffle=given.shuffle)
